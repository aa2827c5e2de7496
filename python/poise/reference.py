"""Prints a page of docs that is made from a table: python -m poise.reference deepspeed|training_arguments."""

from __future__ import annotations

import sys

from poise import arguments_table, own_arguments
from poise.deepspeed.keys import reference as deepspeed


def training_arguments() -> str:
    return arguments_table.reference() + own_arguments.reference()


PAGES = {"deepspeed": deepspeed, "training_arguments": training_arguments}

if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in PAGES:
        print(PAGES[sys.argv[1]](), end="")
    else:
        sys.exit(f"give one of {', '.join(PAGES)}")
