"""A private Slurm in one directory: real daemons, virtual nodes, fake GPUs.  See docs/dev_cluster.md."""
