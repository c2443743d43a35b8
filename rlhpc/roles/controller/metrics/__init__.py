"""Observability of a run: metrics, totals, status.json, timeline, the summary at the end."""
