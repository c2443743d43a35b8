"""What can be found wrong before a run starts, or in what it has written.  Changes nothing of a run."""
