"""The demonstration: a task, a partially trained model, and a report of what RL improved."""
