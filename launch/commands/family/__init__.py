"""`rlhpc submit --seeds … --sweep …`: runs that differ in a few settings, submitted together."""
