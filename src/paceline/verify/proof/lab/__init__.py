"""Experiments on one step: every worker does the same work on its own, so whatever differs has a cause that can be named."""
