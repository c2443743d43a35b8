"""`rlhpc metrics RUN_DIR`: the figures of a run as a table, or as files of other programs.

Input: a run directory, of a run that goes on as well.  Output: CSV or Parquet, a row a step; or a run of Weights &
Biases in files.  Nothing is written into the run directory, and no network is used but by --wandb --follow.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launch.commands.metrics.exported import ExportedRun
from launch.common.counted import counted
from launch.reading.metric_table import metric_table
from rlhpc.errors import ConfigError
from rlhpc.files import write_atomically
from rlhpc.metrics.curve_table import CurveTable
from rlhpc.run_layout import RunLayout


def show_metrics(layout: RunLayout, options: argparse.Namespace) -> int:
    """Print or write them.  Raises ConfigError: no run, no such metric, no such form; OSError."""
    _check_name(options.out)
    if options.follow:
        if options.wandb is None:
            raise ConfigError("--follow: legal only beside --wandb; `rlhpc tensorboard` shows a run that goes on")
        from launch.commands.metrics.wandb_follow import follow_wandb  # an optional package

        return follow_wandb(options.wandb, layout, options.tag)
    table = metric_table(layout, options.tag)
    if options.wandb is not None:
        from launch.commands.metrics.wandb_files import write_wandb  # an optional package

        print(write_wandb(options.wandb, ExportedRun(layout, table)))
    elif options.out is None:
        sys.stdout.writelines(table.csv_lines())
    else:
        write_table(options.out, table)
        print(f"{options.out}: {counted(len(table.steps), 'step')}, {counted(len(table.curves), 'metric')}")
    return 0


def write_table(file: Path, table: CurveTable) -> None:
    """In the form of the suffix, whole or not at all.  Raises ConfigError: another suffix; OSError."""
    _check_name(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".csv":
        write_atomically(file, "".join(table.csv_lines()).encode())
        return
    from rlhpc.data.arrow_tables import columns_as_parquet  # loading pyarrow takes a while

    write_atomically(file, columns_as_parquet(table.columns()))


def _check_name(file: Path | None) -> None:
    if file is not None and file.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--out {file}: legal: a name that ends in .csv or .parquet")
