"""The policy loss: an objective per token, times an importance weight.  A file for each objective."""
