"""What keeps training from starting on these machines, and what to do about it: the checks of `paceline doctor`."""
