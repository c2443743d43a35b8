"""How good a model is on a dataset: samples with verdicts on disk, and the figures that follow from them."""
