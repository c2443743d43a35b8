"""Metrics, TensorBoard and the progress line."""
