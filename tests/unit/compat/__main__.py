"""Tries every contract of compat/ on the torch that is installed, and prints each name with what became of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from tests.unit.compat.contracts import CONTRACTS


def main() -> int:
    """Return 1 if torch has changed something that we lean on."""
    for file in sorted(Path(__file__).parent.glob("test_contract_*.py")):
        importlib.import_module(f"tests.unit.compat.{file.stem}")
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")
    broken = 0
    for names, contract in CONTRACTS:
        try:
            contract()
        except AssertionError as error:
            broken += len(names)
            print(f"CHANGED  {error}")
        else:
            print("\n".join(f"ok       {name}" for name in names))
    print(f"{sum(len(names) for names, _ in CONTRACTS)} names, {broken} changed")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
