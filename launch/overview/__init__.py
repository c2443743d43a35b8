"""`rlhpc list`: every run below a directory and in the queue, a line each."""
