"""How much memory a run will need on each rank, and whether it fits."""
