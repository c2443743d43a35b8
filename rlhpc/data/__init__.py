"""Prompts in a seeded, resumable order."""
