"""The layers split among the workers, shards flowing through as micro-batches."""

from paceline.strategies.pipeline.strategy import Pipeline

__all__ = ["Pipeline"]
