"""Workers step alone and average their weights now and then."""

from paceline.strategies.local_sgd.strategy import LocalSgd

__all__ = ["LocalSgd"]
