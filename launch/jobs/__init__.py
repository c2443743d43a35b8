"""Runs as Slurm jobs: planned, written as scripts, submitted, watched, stopped, resumed."""
