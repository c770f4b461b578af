"""Balancing a pole on a cart: one agent learns from the episodes of several observers."""

from __future__ import annotations

from paceline.tasks.cartpole.request import Request
from paceline.tasks.cartpole.start import start

__all__ = ["Request", "start"]
