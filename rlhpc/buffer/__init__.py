"""Admission, group assembly, rollouts on disk."""
