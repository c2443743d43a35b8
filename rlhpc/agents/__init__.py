"""Agents: a user's program that samples through an OpenAI-compatible endpoint in the generator."""
