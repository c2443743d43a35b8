"""`rlhpc report RUN_DIR`: what a run did, on the terminal in short, or as a page for a browser.

Input: a run directory, of a run that goes on as well.  Output: text, or an HTML file.
"""

from __future__ import annotations

from pathlib import Path

from launch.commands.evaluate.past import past_evaluations
from launch.common.counted import counted
from launch.common.text_table import escaped
from launch.reading.report_data import as_text, read_report
from rlhpc.run_layout import RunLayout


def report_run(layout: RunLayout, page: Path | None) -> int:
    """Print the short form, and write the page if one is named.  Raises ConfigError: no run is here."""
    report = read_report(layout, past_evaluations(layout) if layout.evaluations.is_dir() else {})
    if page is None:
        print(escaped("\n".join(as_text(report))))
        return 0
    from launch.reading.report_page import write_report

    num_bytes = write_report(page, report)
    size = f"{counted(report.figures.num_steps, 'step')}, {counted(len(report.marks), 'event')}"
    print(f"{page}: {size}, {num_bytes / 1e6:.1f} MB")
    return 0
