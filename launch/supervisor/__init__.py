"""The supervisor of a Slurm job and the wrapper around its tasks.  Python 3.9 and the standard library, nothing else.

A compute node may have nothing more: the roles themselves run in an environment or a container image of their own.
Modules imported from rlhpc keep to the same rule (held by tests/architecture).
Nothing imports this room: batch scripts start it by `python -m launch.supervisor`.
"""
