"""Frames that only two processes can write and read: AES-256-GCM with a key for each sender and recipient.

A key is made of the secret and of a random number that each side draws when it begins, so none is ever used by two pairs, nor
in two lives of one process. Messages are counted, and the count is part of what is sealed: one that is repeated, changed, cut
short or out of its order is refused.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

BOOT_BYTES = 16
"""The random number by which one life of a process is known."""
TAG_BYTES = 16
LARGEST_HEAD = 64 << 20
"""How a message begins may be no larger: nobody can have more than this set aside before it is known who wrote it."""
PIECE = 256 << 10
"""What is sealed, sent and opened at a time: it stays in a core's cache, and the other side opens one meanwhile."""
_HEADER = struct.Struct(f"<{BOOT_BYTES}sQI")
HEADER_BYTES = _HEADER.size
_INTO = hasattr(AESGCM, "decrypt_into")
"""Before version 47 `cryptography` only returned memory of its own."""


class SealError(ValueError):
    """A message that was not written by whom it names, or not for this process, or has been here before."""


def header(boot: bytes, count: int, frames: int) -> bytes:
    """Return how a message begins: who sends it, which of the sender's it is, and of how many frames."""
    return _HEADER.pack(boot, count, frames)


def read_header(content: memoryview) -> tuple[bytes, int, int]:
    """Return what a message begins with."""
    if len(content) < HEADER_BYTES:
        raise SealError("a message is too short to have a sender")
    boot, count, frames = _HEADER.unpack_from(content)
    return boot, count, frames


def derived(secret: bytes, *parts: bytes) -> bytes:
    """Return a key for one purpose, made of the secret."""
    return hmac.digest(secret, b"\0".join((b"paceline", *parts)), "sha256")


class Seal:
    """One direction between two processes."""

    def __init__(self, secret: bytes, sender: bytes, recipient: bytes) -> None:
        self._cipher = AESGCM(derived(secret, b"frames", sender, recipient))
        self._last = 0

    def close(self, head: bytes, place: int, content: memoryview | bytes) -> bytes:
        """Seal the frame at this place of the message that begins with `head`."""
        return self._cipher.encrypt(_nonce(head, place), content, head)

    def close_into(self, head: bytes, place: int, content: memoryview, target: memoryview) -> None:
        """Seal a frame into memory that has room for its tag, too."""
        if _INTO:
            self._cipher.encrypt_into(_nonce(head, place), content, head, target)
        else:
            target[:] = self.close(head, place, content)

    def check(self, count: int) -> None:
        """Take note of a message that has arrived, or refuse one that comes a second time or late."""
        if count <= self._last:
            raise SealError("a message comes a second time")
        self._last = count

    def open(self, head: bytes, place: int, content: memoryview) -> bytes:
        """Return the content of a frame."""
        try:
            return self._cipher.decrypt(_nonce(head, place), content, head)
        except InvalidTag:
            raise SealError("a frame was not sealed for this place") from None

    def open_into(self, head: bytes, place: int, content: memoryview, target: memoryview) -> None:
        """Write the content of a frame into memory of its size."""
        if not _INTO:
            target[:] = self.open(head, place, content)
            return
        try:
            self._cipher.decrypt_into(_nonce(head, place), content, head, target)
        except InvalidTag:
            raise SealError("a frame was not sealed for this place") from None


def _nonce(head: bytes, place: int) -> bytes:
    """Return the count of a message, as it stands in its header, and the place in it."""
    return head[BOOT_BYTES : BOOT_BYTES + 8] + place.to_bytes(4, "little")


def sign(secret: bytes, purpose: str, content: Sequence[bytes]) -> bytes:
    """Return the proof that whoever wrote this knows the secret; each part is counted, so no two contents look alike."""
    lengths = struct.pack(f"<{len(content)}Q", *map(len, content))
    return derived(secret, purpose.encode(), lengths, *content)
