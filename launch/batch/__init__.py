"""What runs in the batch step of a Slurm job and around its tasks.  Python 3.9 and the standard library, nothing else.

A node may have no more than that: the roles themselves run in an environment or an image of their own.  Of rlhpc only
errors, files and run_layout are imported, which keep to the same rule (tests/architecture holds it).
"""
