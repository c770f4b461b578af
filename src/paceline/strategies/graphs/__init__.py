"""A whole step as one CUDA graph: what may be captured, what it is fed with, and its replay."""
