"""Faults on purpose, and the proof that nothing came of them."""
