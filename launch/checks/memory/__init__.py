"""What a run needs of a GPU, by formulas, and whether that fits."""
