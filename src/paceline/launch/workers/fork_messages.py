"""How large a message between a launcher and its fork server may be. Imports nothing: both ends do."""

MAX_MESSAGE = 4096
"""Bytes."""
MAX_DESCRIPTORS = 8
