"""How long a test waits for what will come, as opposed to what shall not: a limit that no busy machine reaches."""

PATIENCE_S = 60.0  # for what takes milliseconds on a quiet machine
