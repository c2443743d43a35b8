"""Inspect compute nodes with tiny jobs."""
