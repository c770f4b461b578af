"""Sums in one order: the tree over logical shards, and what carries its parts between workers."""
