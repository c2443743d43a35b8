"""Checkpoints on disk: the trainer's part of one, and the directories that hold them."""
