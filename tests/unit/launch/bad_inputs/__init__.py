"""Inputs that are refused, as users make them: a table of cases in modules by subject, and where they are tried."""
