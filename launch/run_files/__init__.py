"""Files of a run directory through which the launcher, the supervisors and their tasks inform each other.

Plans, records of jobs, exits and events, the state of a run, requests.  Reads and writes these; decides nothing.
Python 3.9 and the standard library, because supervisors use it on compute nodes that may have nothing more."""
