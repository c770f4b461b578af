"""The same comparison for a script that knows nothing of paceline, through torch's own hooks."""
