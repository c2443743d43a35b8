"""`rlhpc doctor`: would a run work here?  From the login node, and by jobs of a few seconds.  docs/doctor.md."""
