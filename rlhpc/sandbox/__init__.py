"""Run a program that a language model wrote, on a node that others use, without root and without Docker."""
