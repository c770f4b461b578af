"""The secret that the processes of a run share, and the keys that are derived from it. Imports no torch."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from paceline.errors import InputError

SHORTEST = 16
"""A secret of fewer characters could be guessed by trying."""
_KEY_BYTES = 32


@dataclass(frozen=True)
class KeyPair:
    """The two halves of a CURVE key, as ZeroMQ takes them."""

    public: bytes
    private: bytes = field(repr=False)


@dataclass(frozen=True)
class Secret:
    """What only the processes of one run know. It is never sent: keys are derived from it."""

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.text) < SHORTEST:
            raise InputError(
                f"the run's secret has {len(self.text)} characters, which can be guessed. Give {SHORTEST} or more, "
                "for example from `openssl rand -hex 32`."
            )

    @classmethod
    def make(cls) -> Secret:
        """Return a new random secret."""
        return cls(secrets.token_hex(_KEY_BYTES))

    @classmethod
    def given(cls, text: str | None, path: str | None) -> Secret | None:
        """Return the secret that was given as text, or else in a file; None where neither was."""
        text = (text or "").strip()
        if text:
            return cls(text)
        return cls.read(Path(path)) if path else None

    @classmethod
    def read(cls, path: Path) -> Secret:
        """Read a file that only its owner may read."""
        try:
            with path.open(encoding="utf-8") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(1 << 16).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise InputError(f"the secret in {path} cannot be read: {reason}.") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise InputError(
                f"others may read the secret in {path} (mode {mode & 0o777:o}). Run `chmod 600 {path}` first."
            )
        return cls(text)

    def key(self, *label: str | bytes) -> bytes:
        """Return the 32 bytes that are this secret's key for one purpose."""
        parts = [one.encode() if isinstance(one, str) else one for one in label]
        message = b"".join(len(one).to_bytes(4) + one for one in parts)
        return hmac.digest(self.text.encode(), b"paceline " + message, "sha256")

    def key_pair(self, part: str) -> KeyPair:
        """Return the CURVE keys of one part of a conversation: "server" or "client"."""
        private = z85.encode(self.key("curve", part))
        return KeyPair(zmq.curve_public(private), private)
