"""`rlhpc submit --seeds … --sweep …`: runs that differ in a few settings, each submitted as by `rlhpc submit`.

Input: run file, overrides, values of --seeds and --sweep, a site file.  Output: jobs.  Guarantees: no two runs have the
same name or directory; all are checked before the first is submitted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from launch.commands.submit import Tell, check, dependency, prepare, submit_checked, warn_of_unknown_jobs
from launch.common.text import counted
from launch.doctor.slurm_plan import as_far_as_slurm_answers
from launch.run_directory.prepare import refuse_run_dir_for_jobs
from rlhpc.config.file import key_meant, load_config
from rlhpc.config.rules import Config, with_values
from rlhpc.protocol.errors import ConfigError, RlhpcError

MOST_RUNS = 64  # so that a seed mistaken for a number of runs does not fill the queue


def submit_sweep(options: argparse.Namespace, tell: Tell) -> int:
    """Submit every run of a sweep, or with --dry-run check and list them; returns exit status 0.

    With --resume, runs without a directory begin.  Raises ConfigError: nothing was submitted; or some runs were not
    after others had been, and the message names them.
    """
    if options.wait:
        raise ConfigError("--wait: only for a single run; `rlhpc list` shows several")
    after = dependency(options.after)
    members = sweep_of(options.run_file, options.overrides, options.seeds, options.sweep)
    runs = [prepare(config, options.site_file) for config in members.values()]
    checked: set[str] = set()
    for varied, run in zip(members, runs, strict=True):
        tell(f"run         {run.layout.root}: {varied}")
        nameless = with_values(run.config, {"run.name": "", "run.directory": None, "run.seed": 0}).model_dump_json()
        if nameless not in checked and options.dry_run:
            as_far_as_slurm_answers(partial(check, run, tell), tell)
        elif nameless not in checked:
            check(run, tell)
        checked.add(nameless)
    warn_of_unknown_jobs(options.after, tell)
    refused = []
    for run in runs:
        is_resumed = options.resume and run.layout.root.exists()
        try:
            if options.dry_run:
                how = {"resume": is_resumed, "fresh": options.fresh}
                as_far_as_slurm_answers(partial(refuse_run_dir_for_jobs, run.config, run.layout, **how), tell)
            else:
                submit_checked(run, after, resume=is_resumed, fresh=options.fresh, tell=tell)
        except (RlhpcError, OSError) as error:
            refused.append(f"{run.config.run.name}: {error}")
    if not options.dry_run:
        tell(f"next        rlhpc list {runs[0].layout.root.parent}")
    outcome = "would not be submitted" if options.dry_run else "not submitted"
    if refused:
        raise ConfigError("\n".join([f"{counted(len(refused), 'run')} of {len(runs)} {outcome}:", *refused]))
    return 0


def sweep_of(run_file: Path, overrides: Sequence[str], seeds: str | None, sweeps: Sequence[str]) -> dict[str, Config]:
    """Settings of every combination of swept values and seeds, by overrides, "trainer.learning_rate=1e-6 run.seed=7".

    seeds: "3" for three from run.seed on, "7,8,9" or "7," for these.  sweeps: "key=value,value".  Each run is called
    NAME-KEY-VALUE-seed-N, and its directory lies beside that of NAME.  Raises ConfigError naming key and value.
    """
    base = load_config(run_file, overrides)
    axes = [_parsed(text) for text in sweeps]
    axes += [("run.seed", _seeds(seeds, base.run.seed))] if seeds is not None else []
    num_runs = math.prod(len(values) for _, values in axes)
    if not 1 <= num_runs <= MOST_RUNS:
        hint = f"; for the one seed: --seeds {seeds}," if seeds and seeds.isdecimal() else ""
        raise ConfigError(f"--seeds and --sweep: {num_runs} runs; legal: 1 to {MOST_RUNS} at once{hint}")
    members: dict[str, Config] = {}
    for values in itertools.product(*(values for _, values in axes)):
        pairs = [(key, value) for (key, _), value in zip(axes, values, strict=True)]
        words = "".join(f"-{key.rpartition('.')[2]}-{value}" for key, value in pairs)
        suffix = re.sub(r"[^A-Za-z0-9._-]", "_", words)
        directory = base.run_directory.with_name(base.run_directory.name + suffix)
        own = [f"run.name={json.dumps(base.run.name + suffix)}", f"run.directory={json.dumps(str(directory))}"]
        varied = [f"{key}={value}" for key, value in pairs]
        members[" ".join(varied)] = load_config(run_file, [*overrides, *varied, *own])
    if len({config.run.name for config in members.values()}) < num_runs:
        raise ConfigError(f"--seeds and --sweep: two runs would have the same name: {', '.join(members)}")
    return members


def _parsed(text: str) -> tuple[str, Sequence[str | int]]:
    key, equals, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not equals or not key or not all(values):
        raise ConfigError(f"--sweep {text!r}: legal: section.key=value,value such as trainer.learning_rate=1e-6,2e-6")
    if "." not in key:
        meant = key_meant(key.strip())
        hint = f" (did you mean {meant}={listed}?)" if "." in meant else ""
        raise ConfigError(f"--sweep {text!r}: a key without its section; legal: section.key=value,value{hint}")
    return key.strip(), values


def _seeds(text: str, first: int) -> Sequence[str | int]:
    words = [word.strip() for word in text.removesuffix(",").split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--seeds {text!r}: legal: how many (3), or the seeds themselves (7,8,9; one alone: 7,)")
    return range(first, first + int(text)) if text.isdecimal() else [int(word) for word in words]
