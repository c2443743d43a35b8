"""Trainer backends and what they share."""
