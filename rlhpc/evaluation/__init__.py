"""Evaluate a model on a dataset: samples with verdicts on disk, and statistics of them."""
