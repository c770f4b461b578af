"""Each layer's matrices split among the workers."""

from paceline.strategies.tensor.strategy import TensorParallel

__all__ = ["TensorParallel"]
