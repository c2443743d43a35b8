"""GPU memory that a run needs, by formulas, and whether it fits."""
