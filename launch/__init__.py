"""The launcher: command line, plans, checks, Slurm, and the supervisors of jobs.  docs/design.md §8 names the rooms."""
