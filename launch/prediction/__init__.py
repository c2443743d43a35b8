"""How fast a run will be, from measured rates and one formula."""
