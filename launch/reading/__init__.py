"""Views of a run for people: rollouts with their texts and advantages, metrics over steps, a history of events.

Reads run directories, also of running runs; writes to none.
"""
