"""What runs on the login node: command line, plan, executors, the demo."""
