"""A generator: an engine between the controller and the reward service."""
