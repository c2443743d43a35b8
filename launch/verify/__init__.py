"""Whether the files of a run are whole and agree with each other: `rlhpc audit` and `rlhpc check RUN_DIR`."""
