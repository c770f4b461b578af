"""What a writer of a part leaves for the first worker, on a disk that is full."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from paceline.checkpoint.pending_checkpoint import Fault, PendingCheckpoint
from paceline.errors import DiskFaultError


def test_a_writer_without_room_for_words_still_says_that_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = PendingCheckpoint(tmp_path / "step-1", tmp_path / ".step-1.partial", replaces=False)
    pending.make()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PendingCheckpoint, "_leave", full)
    pending.mark_done(1, None, Fault("full", disk=True))
    with pytest.raises(DiskFaultError, match="step-1: No space left on device"):
        pending.done_parts()
