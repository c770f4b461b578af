"""Attention under `--compile` on a GPU whose bits repeat: cuDNN's forward pass and a backward pass of our own."""
