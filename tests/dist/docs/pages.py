"""Runs what a page of the documents shows: every fenced block, in order, in a folder of the page's own.

A `python` block whose first line names a file (`# task.py`) is that file: it is compared with the repository's
own, or written for the commands below it, one of which must name it. Any other `python` block is run as it
stands. A `console` block holds commands after `$ `, each with the lines of output that it must give, in order;
`...` stands for anything, and the width of a gap does not matter. A command ends with status 0 unless it says
otherwise: `# exit status 2`.

Python files and `paceline` run in a copy of a process that has loaded torch, where one is given; in the README, the
first command of each kind is started as a reader would start it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.dist.docs.warm import Warm

REPOSITORY = Path(__file__).parents[3]
BINARIES = Path(sys.executable).parent
LIMIT_S = 180.0
"""Against a command that hangs; the slowest takes some 8 s on a quiet machine."""
_BLOCK = re.compile(r"^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
_FILE = re.compile(r"# (\S+\.py)\n")
_EXTRAS = {"mpirun": "mpi"}
"""Programs that an extra of paceline's brings."""
_PAGES = {"huggingface.md": ("transformers", "hf")}
"""Pages about what an extra brings."""
_STATUS = re.compile(r"# exit status (\d+)")


class MissingProgramError(Exception):
    """A page shows a program of an extra that is not installed here."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    place: str
    """The page and the line, for messages."""
    language: str
    text: str


@dataclass(frozen=True)
class Ran:
    """A command of a page, and what it printed on both streams."""

    command: str
    output: str


def blocks(page: Path) -> list[Block]:
    """Find the fenced blocks of a page."""
    text = page.read_text()
    found = [
        Block(f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}", match[1].strip(), match[2])
        for match in _BLOCK.finditer(text)
    ]
    fences = len(re.findall(r"^\s*(```|~~~)", text, re.MULTILINE))
    assert fences == 2 * len(found), f"{page.name} has {fences} fences, but {len(found)} whole blocks"
    return found


def environment() -> dict[str, str]:
    """Give the variables that commands of a page see."""
    return {**os.environ, "PATH": f"{BINARIES}:{os.environ['PATH']}", "COLUMNS": "120"}


def run_page(page: Path, folder: Path, warm: Warm | None = None) -> list[Ran]:
    """Run every block of a page, and fail where one is wrong or nothing runs it."""
    if page.name in _PAGES and find_spec(_PAGES[page.name][0]) is None:
        package, extra = _PAGES[page.name]
        raise MissingProgramError(f"{package}, of the extra {extra}, is not installed here")
    shutil.copytree(REPOSITORY / "examples", folder / "examples")
    shutil.copy2(REPOSITORY / "Makefile", folder)
    (folder / ".venv").symlink_to(sys.prefix)
    ran: list[Ran] = []
    waiting: set[str] = set()
    kinds: set[str] = set()

    def run(command: str, place: str) -> None:
        kind = " ".join(command.split()[:2])
        first = page.name == "README.md" and kind not in kinds
        kinds.add(kind)
        ran.append(_run(command, place, folder, None if first else warm))

    for number, block in enumerate(blocks(page)):
        if block.language == "python":
            if name := _FILE.match(block.text):
                _place_file(block, folder, name[1])
                waiting.add(name[1])
            else:
                script = folder / f"block_{number}.py"
                script.write_text(block.text)
                run(f"python {script.name}", block.place)
        elif block.language == "console":
            for command, expected in _commands(block):
                run(command, block.place)
                _compare(ran[-1], expected, block.place)
                waiting = {name for name in waiting if name not in command}
        else:
            raise AssertionError(f"{block.place}: nothing runs a block of {block.language or 'no language'}")
    assert not waiting, f"{page.name} shows {sorted(waiting)}, but runs no command on it"
    return ran


def _place_file(block: Block, folder: Path, name: str) -> None:
    body = block.text.split("\n", 1)[1].lstrip("\n")
    if (REPOSITORY / name).exists():
        assert body == (REPOSITORY / name).read_text(), f"{block.place} is not what {name} holds"
    else:
        (folder / name).write_text(body)


def _commands(block: Block) -> list[tuple[str, list[str]]]:
    commands: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        else:
            assert commands, f"{block.place}: a console block begins with '$ '"
            commands[-1][1].append(line)
    return commands


def _run(command: str, place: str, folder: Path, warm: Warm | None) -> Ran:
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        # The set-up is not repeated inside a test, and the tests do not run themselves.
        words[1:1] = ["--old-file=.venv/.set-up", *(["--dry-run"] if "test" in words else [])]
    if words[0] in _EXTRAS and not (BINARIES / words[0]).exists():
        extra = _EXTRAS[words[0]]
        raise MissingProgramError(f"{words[0]}, of the extra {extra}, is not installed here")
    wanted = int(status[1]) if (status := _STATUS.search(command)) else 0
    if warm and words[0] == "paceline":
        ended, output = warm.run([str(BINARIES / "paceline"), *words[1:]], folder, LIMIT_S)
    elif warm and words[0] == "python" and words[1].endswith(".py"):
        ended, output = warm.run(words[1:], folder, LIMIT_S)
    else:
        ended, output = _start(words, folder)
    assert ended == wanted, f"{place}: {command} ended with {ended}:\n{output}"
    return Ran(command, output)


def _start(words: list[str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout


def _compare(ran: Ran, expected: list[str], place: str) -> None:
    """Look for the expected lines among those of the output, in order."""
    rest = (_spaced(printed) for printed in ran.output.splitlines())
    for line in expected:
        pattern = re.compile(".*".join(re.escape(part) for part in _spaced(line).split("...")))
        if not any(pattern.fullmatch(printed) for printed in rest):
            raise AssertionError(f"{place}: {ran.command} printed no line {line!r} here:\n{ran.output}")


def _spaced(line: str) -> str:
    return " ".join(line.split())
