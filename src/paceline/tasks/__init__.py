"""Built-in tasks: small, real, offline. The table names them without importing them, so listing is quick."""

from __future__ import annotations

__all__ = ["GAMES", "TASKS"]

TASKS: dict[str, tuple[str, str]] = {
    "dense4096": (
        "paceline.tasks.dense4096:Dense4096",
        "one dense layer on 4,096 samples of a linear teacher, in under a second",
    ),
    "digits": (
        "paceline.tasks.digits:Digits",
        "a small convolutional network on 1,797 real handwritten digits",
    ),
    "addition": (
        "paceline.tasks.addition:Addition",
        "a small causal transformer that learns to add numbers written as text",
    ),
    "recommender": (
        "paceline.tasks.recommender:Recommender",
        "two embedding tables and a small network on generated clicks, with a known best answer",
    ),
}
"""Name -> (reference of the class, one line about it)."""
GAMES = {"cartpole": "a pole balanced on a cart: one agent learns from the episodes of several observers"}
"""What is learned from episodes instead of data: name -> one line about it."""
