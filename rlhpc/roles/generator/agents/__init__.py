"""Agents: programs of the user's own that sample over HTTP, each in a session that is one leased rollout."""
