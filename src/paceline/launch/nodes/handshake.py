"""How two ends of a link prove to each other that they know the run's secret, which itself never travels.

leader -> follower: a challenge; follower -> leader: a challenge of its own and an answer; leader -> follower: an answer.
An answer is the HMAC of both challenges and of the part of whoever gives it, so none can be played back.
"""

from __future__ import annotations

import hmac
import re
import secrets
from typing import Any

_CHALLENGE = re.compile("[0-9a-f]{32}")


class Handshake:
    """One end's side of the exchange: feed it what arrives, send what it gives."""

    def __init__(self, secret: bytes, *, leads: bool) -> None:
        self._secret = secret
        self._leads = leads
        self._ours = secrets.token_hex(16)
        self._theirs: str | None = None
        self.done = False
        """Both ends have proved themselves."""
        self.refused = False
        """The other end has not: nothing it says counts."""

    def opening(self) -> dict[str, str] | None:
        """Return what this end says first, if it is the one to begin."""
        return {"challenge": self._ours} if self._leads else None

    def take(self, greeting: dict[str, Any]) -> dict[str, str] | None:
        """Go one step on with what the other end said, and give the reply, if there is one."""
        if self._theirs is None:
            challenge = greeting.get("challenge")
            if not isinstance(challenge, str) or not _CHALLENGE.fullmatch(challenge):
                self.refused = True
                return None
            self._theirs = challenge
            if not self._leads:
                return {"challenge": self._ours, "answer": self._answer("follower")}
        answer = self._answer("follower" if self._leads else "leader")
        if not hmac.compare_digest(str(greeting.get("answer")).encode(), answer.encode()):
            self.refused = True
            return None
        self.done = True
        return {"answer": self._answer("leader")} if self._leads else None

    def _answer(self, part: str) -> str:
        leader, follower = (self._ours, self._theirs) if self._leads else (self._theirs, self._ours)
        return hmac.digest(self._secret, f"{part} {leader} {follower}".encode(), "sha256").hex()
