"""Samples into micro-batches."""
