"""`rlhpc audit RUN_DIR`: whether every prompt of a run is in exactly one place, proven from its files alone.

evidence.py   reads events, journal, checkpoints, segments, in an order that gives no false alarms on a live run
conservation, steps, rollouts, agreement, lengths, poison      what must be true of them
history.py    all of it, of a run directory that may change meanwhile
"""
