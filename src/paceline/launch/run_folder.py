"""The folder a launch writes into: kept when there is a run in it, gone when there is not."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.errors import InputError
from paceline.launch.base import Outcome
from paceline.training import folder

_OURS = ("logs", folder.SPEC, "receipt.json", "ledger", "workers.json", "events.jsonl")
"""What a run that was never begun takes away again."""


class RunFolder:
    """The user's folder, or a temporary one for the logs of a launch that asked for none."""

    def __init__(self, out: Path | None, record: Mapping[str, Any]) -> None:
        self._temporary = out is None
        self.path = Path(tempfile.mkdtemp(prefix="paceline-")) if out is None else out
        self._record = record
        self._made: list[Path] = []
        self._spec_before: bytes | None = None
        self._keep = not self._temporary

    def __enter__(self) -> RunFolder:
        missing = [one for one in (self.path, *self.path.parents) if not one.exists()]
        # Only what was not there before is ours to take away again.
        self._made = missing or [self.path / name for name in _OURS if not (self.path / name).exists()]
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            if not self._temporary:
                spec = self.path / folder.SPEC
                self._spec_before = spec.read_bytes() if spec.exists() else None
                folder.write_spec(self.path, self._record)
        except OSError as error:
            raise InputError(
                f"the run folder {self.path} cannot be written: {error.strerror}. Choose another --out."
            ) from error
        return self

    def settle(self, outcome: Outcome) -> None:
        """Decide what stays: a run that was never begun leaves nothing, a failed one its logs."""
        failure = outcome.failure
        if failure is not None and failure.kind == "input":
            self._keep = not self._temporary and folder.has_run(self.path)
            if self._spec_before is not None:  # what was refused must not speak for the run that is there
                (self.path / folder.SPEC).write_bytes(self._spec_before)
        elif failure is not None and self._temporary:
            self._keep = True
            print(f"the output of every rank is in {self.path / 'logs'}", file=sys.stderr)  # noqa: T201

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keep:
            return
        for path in [self.path] if self._temporary else self._made:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
