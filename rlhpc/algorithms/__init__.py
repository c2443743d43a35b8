"""Advantages, policy losses, off-policy corrections."""
