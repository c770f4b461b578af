"""The worker processes of one machine: the fork server, the pool, what a worker does and whom it tells."""
