"""Carries out the Dockerfile's instructions in a Debian made by debootstrap, where there is no Docker.

    python tests/packaging/dockerfile_in_a_chroot.py FOLDER [MIRROR]

Needs root, debootstrap and a Debian mirror (default: debootstrap's own). FOLDER is made, or taken up
where an earlier run stopped, and holds the result, about 8 GB: enter it with `chroot FOLDER`. Knows the instructions that our Dockerfile uses and
stops at any other.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines()]


class Chroot:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = "/"
        # Where packages come from is the machine's business: pip's settings go along.
        passed_on = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.environment = {**passed_on, "PATH": path, "HOME": "/root"}
        certificates = passed_on.get("PIP_CERT")
        if certificates:
            (folder / "opt").mkdir(exist_ok=True)
            shutil.copy(certificates, folder / "opt" / "certificates.pem")
            self.environment["PIP_CERT"] = "/opt/certificates.pem"

    def run(self, command: str) -> None:
        inside = f"cd {self.directory} && {command}"
        chroot = ["chroot", str(self.folder), "/bin/sh", "-c", inside]
        subprocess.run(chroot, env=self.environment, check=True)

    def copy(self, source: str, target: str) -> None:
        to = self.folder / self.directory.lstrip("/") / target
        to.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, to, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / source, to)

    def carry_out(self, word: str, rest: str) -> None:
        match word:
            case "RUN":
                self.run(rest)
            case "ARG":
                name, value = rest.split("=", 1)
                self.environment[name] = os.environ.get(name, value)
            case "ENV":
                for name, value in re.findall(r"(\w+)=(\S+)", rest):
                    self.environment[name] = value.replace("$PATH", self.environment["PATH"])
            case "WORKDIR":
                self.directory = rest
                (self.folder / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "COPY":
                self.copy(*rest.split())
            case "CMD":
                pass
            case _:
                sys.exit(f"no rule for the instruction {word} of the Dockerfile")


def main(folder: str, mirror: str | None = None) -> None:
    steps = instructions((ROOT / "Dockerfile").read_text())
    base = dict(steps)["FROM"]
    if not base.startswith("debian:"):
        sys.exit(f"the Dockerfile begins with {base}; debootstrap makes Debian alone")
    suite = base.removeprefix("debian:")
    make = ["debootstrap", "--variant=minbase", suite, folder, *([mirror] if mirror else [])]
    if not (Path(folder) / "etc" / "debian_version").exists():
        subprocess.run(make, check=True)
    chroot = Chroot(Path(folder))
    hosts = Path("/etc/resolv.conf")
    if hosts.exists():
        shutil.copy(hosts, Path(folder) / "etc" / "resolv.conf")
    subprocess.run(["mount", "-t", "proc", "proc", f"{folder}/proc"], check=True)
    try:
        for word, rest in steps:
            if word != "FROM":
                print(f"--> {word} {rest}", flush=True)
                chroot.carry_out(word, rest)
        chroot.run(
            "python -c 'import torch; print(torch.__version__)' && cmake --version | head -1"
        )
    finally:
        subprocess.run(["umount", f"{folder}/proc"], check=False)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
