"""The trainer backend on DeepSpeed's ZeRO."""
