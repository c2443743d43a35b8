"""What Slurm's answers and this login node say of a plan: sizes, partitions, directories, space."""
