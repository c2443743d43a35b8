"""`rlhpc metrics`: the figures of a run as files of other programs."""
