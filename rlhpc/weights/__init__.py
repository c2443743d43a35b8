"""Moving weights from trainer to generators."""
