"""Private names of torch, Python and Linux that paceline leans on; nothing private is used anywhere else."""
