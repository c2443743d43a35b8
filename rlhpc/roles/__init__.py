"""The processes of a run: the only places where the parts meet."""
