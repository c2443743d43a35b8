"""`rlhpc doctor`: all checks of a site, their table and the report to send."""
