"""Check a plan against Slurm's answers and this login node: sizes, partitions, directories, space."""
