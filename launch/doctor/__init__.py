"""Tests of a cluster, its nodes and its shared directory: `rlhpc doctor`."""
