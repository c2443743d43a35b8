"""`rlhpc evaluate`: how good a model is on a dataset, without a run."""
