"""Tensors without memory that compute shapes alone. Importing torch's takes a second: only who makes some imports this."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode"]
