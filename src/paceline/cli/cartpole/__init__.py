"""What `paceline rollouts cartpole` runs: one agent learns to balance a pole from the episodes of several observers."""
