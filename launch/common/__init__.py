"""Utilities for every room of the launcher; independent of runs and of Slurm.  Python 3.9 and the standard library."""
