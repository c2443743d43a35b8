"""Rewards into advantages: one file for each estimator.  Loads without torch."""
