"""A private Slurm in one directory: real daemons, virtual nodes, fake GPUs (README.md)."""
