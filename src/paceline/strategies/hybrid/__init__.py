"""Dense layers under ddp on the trainers, sparse embeddings on servers."""

from paceline.strategies.hybrid.strategy import Hybrid

__all__ = ["Hybrid"]
