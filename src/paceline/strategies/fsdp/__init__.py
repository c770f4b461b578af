"""Weights, gradients and optimizer state sharded among the workers."""

from paceline.strategies.fsdp.strategy import Fsdp

__all__ = ["Fsdp"]
