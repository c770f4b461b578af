"""What lets a model be larger than a device: made in parts, recomputed, kept in host memory."""
