"""Worlds that somebody else has started."""
