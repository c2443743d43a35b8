"""Heterogeneous Slurm jobs for submitit; usable without the rest of this project."""
