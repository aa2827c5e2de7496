"""Names, lengths and words of files: nothing without a home, nothing of one machine."""

from __future__ import annotations

import re

from sources import CPP, ROOT, files

HOMELESS = re.compile(r"^(utils?|common|helpers?|misc|managers?)$")
THEIRS = "python/poise/deepspeed/utils/"  # by the name that scripts import
MAX_LINES = 600
TEXT = {*CPP, ".py", ".pyi", ".cmake", ".txt", ".md", ".toml", ".json", ".yaml", ".sh", ".in", ""}
# Folders that exist on one machine only, and hosts that a build must not know.
MACHINE = re.compile(
    r"(?<![\w.])/(?:work|root|home|Users)/\w"
    r"|(?:py" + r"pi\.org|python" + r"hosted\.org|download\.py" + r"torch\.org)"
)
HERE = "tests/rules/test_names.py"


def text_of(name) -> str:
    return (ROOT / name).read_text(encoding="utf-8", errors="replace")


def text_files():
    return [n for n in files() if n.suffix in TEXT and n.as_posix() != HERE]


def test_every_file_has_a_home():
    named = [n for n in files() if not n.as_posix().startswith(THEIRS)]
    wrong = [n for n in named for part in (*n.parts[:-1], n.stem) if HOMELESS.match(part)]
    assert not wrong, f"name them after what they hand on: {wrong}"


def test_no_file_is_a_warehouse():
    lengths = {n: text_of(n).count("\n") for n in text_files() if n.suffix in (*CPP, ".py")}
    longest = sorted(lengths, key=lengths.get, reverse=True)
    print("longest files:", *(f"{lengths[n]:5d} {n}" for n in longest[:5]), sep="\n  ")
    assert all(lengths[n] <= MAX_LINES for n in longest), f"split {longest[0]}"


def test_no_path_or_host_of_one_machine():
    wrong = [f"{n}: {m.group()}" for n in text_files() for m in MACHINE.finditer(text_of(n))]
    assert not wrong, "\n".join(wrong)


def test_sources_are_ascii():
    rooms = ("include", "src", "kernels")
    wrong = [n for n in files() if n.parts[0] in rooms and not text_of(n).isascii()]
    assert not wrong, wrong


def test_every_source_says_what_lives_in_it():
    wrong = []
    for name in text_files():
        if name.suffix in CPP and name.parts[0] in ("include", "src", "kernels", "python"):
            if not text_of(name).startswith("//"):
                wrong.append(name)
    assert not wrong, f"open with a sentence: {wrong}"
