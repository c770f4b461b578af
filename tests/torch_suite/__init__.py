"""Runs torch's own tests of a backend against the one on MPI: `python -m tests.torch_suite`. Not part of `make test`."""
