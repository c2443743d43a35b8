"""Predict speed and cost of a run before it starts: the ring in virtual time, with the run's ledger and packing."""
