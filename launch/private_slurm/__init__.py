"""A private Slurm in one directory: real daemons, virtual nodes, fake GPUs (docs/dev_cluster.md)."""
