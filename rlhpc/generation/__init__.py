"""Engines that sample completions."""
