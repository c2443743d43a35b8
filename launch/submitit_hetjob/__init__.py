"""Heterogeneous Slurm jobs for submitit, usable alone; needs launch/slurm and nothing else of the launcher.

supervisor.py and step.py run in the batch step: Python 3.9 and the standard library."""
