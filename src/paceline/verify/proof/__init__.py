"""The proof against one process: recorded runs, their comparison, and the cause where they differ."""
