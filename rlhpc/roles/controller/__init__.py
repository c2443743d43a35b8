"""The controller: one process that admits, grants, collects, feeds the trainer and publishes."""
