"""The run file: its tables, the rules between their keys, reading it."""
