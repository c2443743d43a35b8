"""Runs as people look at them: rollouts with their texts and advantages, figures over steps, what happened when.

Reads run directories, of runs that go on as well, and writes none.
"""
