"""Runs as Slurm jobs: plan, write scripts, submit, watch, stop, resume."""
