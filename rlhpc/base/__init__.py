"""Files, deadlines, processes, user code: what the rest stands on."""
