"""`rlhpc doctor`: would a run work on this site?  Checks on the login node, and jobs of seconds.  docs/doctor.md."""
