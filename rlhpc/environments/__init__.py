"""Environments of several turns: the dialogue with the policy, the host of environments, tools."""
