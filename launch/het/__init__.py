"""Heterogeneous Slurm jobs for submitit: of use without the rest of this project."""
