"""Check that the files of a run are whole and consistent: `rlhpc audit` and `rlhpc check RUN_DIR`."""
