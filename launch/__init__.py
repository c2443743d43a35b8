"""The launcher, which runs on the login node: command line, job plan, executors, site checks, the demo."""
