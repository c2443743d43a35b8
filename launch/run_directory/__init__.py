"""The life cycle of a run directory: its owner, the checkpoint of a resume, the attempt that begins."""
