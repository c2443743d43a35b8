"""The trainer: one process per rank."""
