"""Run file and site file → processes, or Slurm jobs and their scripts.  Pure: queries and writes nothing."""
