"""The commands of `rlhpc`, one file or folder each.  launch/cli.py parses their arguments."""
