"""The life cycle of a run directory: who owns it, which checkpoint a resume takes, which attempt begins."""
