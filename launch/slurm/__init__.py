"""The only place that speaks Slurm: its commands, what they answer, and what that means.

Input: job ids, scripts, options.  Output: job ids, states, facts; SlurmError.  Knows no run directory.
Python 3.9 and the standard library, because supervisors use it on compute nodes that may have nothing more."""
