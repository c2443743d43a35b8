"""Views of a run for people: status, lists, reports, rollouts.  Reads run directories, writes to none."""
