"""Buffers that passes change: through a step, an evaluation and a checkpoint."""
