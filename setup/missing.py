"""Tells what an environment lacks, without importing torch: prints one pip requirement a line.

Run by setup/prepare.sh under the interpreter in question:
    python setup/missing.py torch LOW HIGH        -> prints its version if LOW <= torch < HIGH
    python setup/missing.py requirements FILE any|pinned
`any` takes whatever version is there (an environment that belongs to the user is not changed more
than needed); `pinned` asks for the versions of the file.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version

LINE = re.compile(r'([\w.-]+)==([^;\s]+)\s*(?:;\s*python_version\s*(>=|<)\s*"([0-9.]+)")?$')


def numbers(text):
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def applies(operator, bound):
    if operator is None:
        return True
    new_enough = sys.version_info[:2] >= numbers(bound)[:2]
    return new_enough if operator == ">=" else not new_enough


def missing(path, pinned):
    with open(path, encoding="ascii") as file:
        for line in (text.strip() for text in file):
            if not line or line.startswith("#"):
                continue
            match = LINE.match(line)
            if match is None:
                sys.exit(f"[setup] cannot read this line of {path}: {line}")
            name, wanted, operator, bound = match.groups()
            have = installed(name)
            if applies(operator, bound) and (have is None or (pinned and have != wanted)):
                yield f"{name}=={wanted}"


def main():
    if sys.argv[1] == "torch":
        have = installed("torch")
        low, high = (numbers(text) for text in sys.argv[2:4])
        if have is not None and low <= numbers(have) < high:
            print(have)
    else:
        print("\n".join(missing(sys.argv[2], sys.argv[3] == "pinned")))


if __name__ == "__main__":
    main()
