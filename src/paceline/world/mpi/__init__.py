"""The `mpi` backend: torch's process groups on MPI, through mpi4py. Imported only where it is asked for."""
