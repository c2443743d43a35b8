"""Checks before a run starts, and of the files that it has written.  They change nothing of a run."""
