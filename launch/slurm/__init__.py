"""The only room that uses Slurm: its commands, their answers, and the meaning of these.

Input: job ids, scripts, options.  Output: job ids, states, facts; SlurmError.  Independent of run directories.
Python 3.9 and the standard library, because supervisors use it on compute nodes that may have nothing more."""
