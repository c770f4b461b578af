"""Weights, gradients and optimizer state cut up among the workers."""

from paceline.strategies.fsdp.strategy import Fsdp

__all__ = ["Fsdp"]
