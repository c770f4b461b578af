"""Several machines: how they meet, the links between their launchers, and what the leader asks of the others."""
