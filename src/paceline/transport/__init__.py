"""Authenticated messages between the processes of a run, over ZeroMQ, and the key-value store that process groups meet at."""
