"""What people see of a run: metrics, totals, status.json, the summary at the end."""
