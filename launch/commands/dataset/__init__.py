"""`rlhpc data`: look at a dataset, and write it in another form."""
