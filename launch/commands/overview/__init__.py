"""`rlhpc list`: your runs, one line each."""
