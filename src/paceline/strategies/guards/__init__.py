"""What a strategy refuses, or follows, in the user's code: whatever would train something else than one process does."""
