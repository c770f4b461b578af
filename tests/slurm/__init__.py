"""A real SLURM of one machine, made for the tests and taken away again."""
