"""The state of a run: tensors in chunks, under names that no strategy changes, and their way between workers."""
