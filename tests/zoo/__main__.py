"""Runs the zoo: every task on every strategy in real workers, and prints what works with what."""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.zoo import support
from tests.zoo.cells import Cell, Verdict, every
from tests.zoo.exhibits import chosen
from tests.zoo.layouts import LABELS, LAYOUTS
from tests.zoo.open import is_open
from tests.zoo.parallel import run_in_parts
from tests.zoo.running import Zoo


def main() -> int:
    """Run the cells that were asked for, and return 1 if one of them ends in a way that is not allowed."""
    asked = _arguments()
    cells = _cells(asked)
    if asked.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    if asked.page:
        support.PAGE.write_text(support.page(chosen(())))
        return 0
    started = time.perf_counter()
    if asked.jobs > 1:
        verdicts = run_in_parts(cells, asked.jobs)
    else:
        progress = Progress(len(cells))
        with Zoo(progress.tell) as zoo:
            verdicts = zoo.run(cells)
        progress.close()
    bad = {name: str(verdict) for name, verdict in verdicts.items() if not verdict.good}
    if asked.json:
        print(json.dumps({name: str(verdict) for name, verdict in verdicts.items()}))
        return 1 if bad else 0
    print(support.matrix(cells, verdicts))
    for name, text in bad.items():
        print(f"{name}: {text}{'  (known)' if is_open(name) else ''}")
    for name in verdicts.keys() - bad.keys():
        if is_open(name):
            print(f"{name} is mended: take it out of tests/zoo/open.py")
    print(f"{len(verdicts)} cells, {len(bad)} not allowed, in {time.perf_counter() - started:.0f} s")
    if asked.write and not bad:
        support.PAGE.write_text(support.page(chosen(())))
    return 1 if bad else 0


def _cells(asked: argparse.Namespace) -> list[Cell]:
    if not asked.cell:
        return every(chosen(asked.task), asked.strategy)
    known = {cell.name: cell for cell in every(chosen(()))}
    missing = [name for name in asked.cell if name not in known]
    if missing:
        raise SystemExit(f"no cell {missing[0]!r}. --list prints all.")
    return [known[name] for name in asked.cell]


class Progress:
    """One line on standard error; what ended badly stays there."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._bad = total, 0, 0
        self._clear = "\r\033[K" if sys.stderr.isatty() else ""

    def tell(self, cell: Cell, verdict: Verdict) -> None:
        """Show one cell that has ended."""
        self._done += 1
        if not verdict.good:
            self._bad += 1
            sys.stderr.write(f"{self._clear}{cell.name}: {verdict}\n")
        if self._clear:
            sys.stderr.write(f"{self._clear}{self._done}/{self._total} cells, {self._bad} bad; {cell.name}")
        sys.stderr.flush()

    def close(self) -> None:
        """Take the line away."""
        sys.stderr.write(self._clear)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--task", action="append", default=[], help="only this task; may be repeated")
    parser.add_argument(
        "--strategy",
        action="append",
        default=[],
        choices=[*LABELS, *(layout.name for layout in LAYOUTS)],
        metavar="NAME",
        help=f"only this strategy ({', '.join(LABELS)}) or layout (ddp-3w4s); may be repeated",
    )
    parser.add_argument("--cell", action="append", default=[], help="only this cell, like tied@fsdp-2w4s")
    parser.add_argument("--jobs", type=int, default=1, help="how many layouts are tried at the same time")
    parser.add_argument("--list", action="store_true", help="print the names of the cells, and run none")
    parser.add_argument("--json", action="store_true", help="print the verdicts as one JSON object")
    parser.add_argument("--write", action="store_true", help="write docs/support.md when all is well")
    parser.add_argument("--page", action="store_true", help="write docs/support.md, and run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
