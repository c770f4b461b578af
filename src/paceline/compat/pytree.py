"""Functions over nests of lists, tuples, dicts and registered classes; torch has no public name for them."""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_iter, tree_leaves, tree_map, tree_map_only

__all__ = ["tree_flatten", "tree_iter", "tree_leaves", "tree_map", "tree_map_only"]
