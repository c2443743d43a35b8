"""What a cluster, its nodes and its shared directory can do: `rlhpc doctor`."""
