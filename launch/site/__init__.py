"""The site file: where runs run."""
