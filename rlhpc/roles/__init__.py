"""The processes of a run: the only places where the other packages are combined."""
