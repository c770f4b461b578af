"""Every worker has the whole model: one process, threads of one, processes, and these with sharded optimizer state."""
