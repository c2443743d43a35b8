"""What every room of the launcher may use; knows nothing of runs or of Slurm.  Python 3.9 and the standard library."""
