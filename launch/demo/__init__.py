"""The demonstration: a task, a model that half knows it, and the report of what RL made of it."""
