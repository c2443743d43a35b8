"""The whole demo: make a model that adds carelessly, train it by RL in real processes, report.

Everything is generated locally from seeds; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launch.checks.preflight import has_stage_before, require_parts, stage_of
from launch.commands.run import run_locally
from launch.commands.submit import submit_run
from launch.common.text import as_typed, quoted, say_or_lose
from launch.demo import lookup, stages
from launch.demo.lookup import make_lookup_model
from launch.demo.stand_in import make_stand_in
from launch.demo.task import draw_learning_curve, write_dataset
from launch.demo.warm_start import make_model
from launch.doctor.gpus import gpus_here
from launch.plan.gpu_map import map_gpus
from launch.plan.site_file import walltime_s
from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.packages import obtain
from launch.private_slurm.shape import default_shape
from launch.run_files.run_state import figures_table, is_complete
from launch.view.status import wait_for_run
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config, with_values
from rlhpc.config.tables import CONTAINER
from rlhpc.protocol.errors import ConfigError

# ---------------------------------------------------------------------------------------------------------------- slurm
#
# The demo on Slurm: a private cluster of virtual nodes, its site file, one heterogeneous job on three partitions.
#
# Input: the demo's Config.  Output: the exit status of the run.  The cluster is in a separate temporary directory and
# ends with the demo.

OVERRIDES = ("run.name=demo-slurm", "generation.num_replicas=2")  # of the local demo's settings
# One trainer node, two generator nodes, one without GPUs for the controller.
SITE = """\
# Of the demo's private cluster.  slurm/sites/example.toml explains every key.
[cluster]
name = "demo"
shared_directory = "{shared}"
placement = "hetjob"

[common]
time = "{time}"

[controller]
partition = "cpu"

[trainer]
partition = "train"

[generation]
partition = "gen"
gpus_per_node = 1

[prologue]
python = "{python}"
code = "{code}"
"""


def refuse_before_the_work(time: str) -> None:
    """Raise ConfigError for an invalid time, and SlurmMissing if there is no Slurm, before a model is made."""
    try:
        walltime_s(time)
    except ValueError as error:
        raise ConfigError(f"--time {time!r}: {error}") from None
    obtain()


def run_on_slurm(config: Config, time: str, tell: Callable[[str], None]) -> int:
    """Start a cluster, submit the run, wait for its end.  time: limit of the job; if too short, it is requeued.

    Raises SlurmMissing if Slurm is neither installed nor available without root, ConfigError for an invalid time.
    """
    site_file = config.run_directory.with_name(f"{config.run.name}.site.toml")
    site_file.parent.mkdir(parents=True, exist_ok=True)
    code = Path(__file__).parents[2]
    values = {"shared": Path.cwd(), "time": time, "python": sys.executable, "code": code}
    site_file.write_text(SITE.format(**values), encoding="utf-8")
    with _private_cluster() as cluster:
        tell(f"     a private Slurm in {cluster.layout.root}: {len(cluster.shape.nodes)} nodes")
        layout = submit_run(
            config, site_file, resume=False, fresh=True, after=None, tell=lambda text: tell(f"     {text}")
        )
        return wait_for_run(layout)


@contextmanager
def _private_cluster() -> Iterator[DevCluster]:
    """A private cluster, used by this process's Slurm commands."""
    root = Path(tempfile.mkdtemp(prefix="rlhpc-demo-", dir="/tmp"))  # has sockets: the path must be short
    before = dict(os.environ)
    try:
        with DevCluster.create(root, default_shape(1, 2, 1, gpus=1), obtain(), dies_with_parent=True) as cluster:
            os.environ.update(cluster.environment())
            yield cluster
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(root, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------------ run

RUN_FILE = Path(__file__).parents[1] / "configs" / "demo.toml"
NUM_PROBLEMS = 8_000
NUM_LOOKUPS, NUM_TASKS = 4_000, 500
NUM_DEMONSTRATIONS, NUM_HELD_OUT = 4_000, 512
SHOW_EVERY_STEPS = 100
EXPECTED_ACCURACY = (0.22, 0.38)  # before RL; a half-trained model stalls


def demo(options: argparse.Namespace) -> int:
    """Run the demo here or on a private Slurm, or write its model alone; returns the exit status."""
    if options.model_only is not None or options.like is not None:
        return _write_model(options)
    run_file = options.run_file or RUN_FILE
    if not options.slurm:
        map_gpus(load_config(run_file, options.overrides), gpus_here(os.environ))  # refused before the warm start
        return run_demo(_start_here, run_file, options.overrides)
    refuse_before_the_work(options.time)
    return run_demo(lambda config: run_on_slurm(config, options.time, say), run_file, [*OVERRIDES, *options.overrides])


def _start_here(config: Config) -> int:
    """Do the run on this machine, after its stage of supervised fine-tuning if it has one; returns the exit status."""
    if has_stage_before(config):
        stage = stage_of(config)
        status = run_locally(stage, fresh=True)
        if status or not is_complete(RunLayout(stage.run_directory)):
            return status
        config = with_values(config, {"model.path": RunLayout(stage.run_directory).model})
    return run_locally(config, fresh=True)


def _write_model(options: argparse.Namespace) -> int:
    """Write only the demo's model, as a stand-in for a user's own run file."""
    if options.model_only is None:
        raise ConfigError(f"--like {options.like}: has a meaning only with --model-only DIR")
    if options.slurm or options.run_file or options.overrides:
        raise ConfigError("--model-only: writes a model and runs nothing; legal beside it: --like")
    num_parameters = make_stand_in(options.model_only, options.like)
    place = quoted(options.model_only)
    print(f"{options.model_only}: {num_parameters:,} random parameters: no answer will be right.  With your run file:")
    print(f"  rlhpc check RUN.toml model.path={place}")
    more = "model.dtype=float32 run.name=try run.num_steps=3 admission.active_sampling=false"
    print(f"  rlhpc run RUN.toml model.path={place} {more}")
    return 0


def run_demo(start: Callable[[Config], int], run_file: Path = RUN_FILE, overrides: Sequence[str] = ()) -> int:
    """Make the model, `start` the run, show its result; returns the run's exit status."""
    config = load_config(run_file, overrides)
    require_parts(config)
    data = config.data[0].path
    if data is None:
        raise ConfigError(f"data.source={config.data[0].source!r}: the demo writes its own problems; legal: data.path")
    if config.demonstrations:
        _prepare_stages(config, data)
    elif config.data[0].environment:
        _prepare_lookups(config, data.parent)
    else:
        _prepare_additions(config, data)
    say(f"2/3  reinforcement learning: {run_file.name}")
    status = start(config)
    layout = RunLayout(config.run_directory)
    if status == 0 and layout.summary.exists():
        say("3/3  results")
        _report(layout)
    elif status == 0:
        say(
            f"3/3  stopped early; `rlhpc check {quoted(as_typed(layout.root))}` shows what was "
            f"saved; a demo always starts over"
        )
    return status


def _prepare_lookups(config: Config, directory: Path) -> None:
    """Model, questions and documents of the demo of tools; or model, tasks and image of the demo of containers."""
    began = time.monotonic()
    say("1/3  warm start: a tiny model learns to look things up, but mostly guesses")
    form = lookup.SHELL if config.data[0].environment == CONTAINER else lookup.SEARCH
    warm = make_lookup_model(config.model.path, form=form, on_step=_show_step)
    if form is lookup.SHELL:
        lookup.write_tasks(directory, NUM_TASKS, seed=config.run.seed)
    else:
        lookup.write_dataset(directory, NUM_LOOKUPS, seed=config.run.seed)
    seconds = time.monotonic() - began
    say(f"     {warm.num_parameters:,} parameters, searches for {warm.accuracy:.0%} of the questions ({seconds:.0f} s)")


def _prepare_additions(config: Config, data: Path) -> None:
    """Model and problems of the demo."""
    began = time.monotonic()
    say("1/3  warm start: a tiny model learns to add from careless examples")
    warm = make_model(config.model.path, on_step=_show_step)
    write_dataset(data, NUM_PROBLEMS, seed=config.run.seed)
    say(
        f"     {warm.num_parameters:,} parameters, right in {warm.accuracy:.0%} of its samples "
        f"({time.monotonic() - began:.0f} s)"
    )
    if not EXPECTED_ACCURACY[0] <= warm.accuracy <= EXPECTED_ACCURACY[1]:
        low, high = EXPECTED_ACCURACY
        say(f"     the recipe is calibrated for {low:.0%} to {high:.0%}: the curve may be flatter than usual")


def _prepare_stages(config: Config, data: Path) -> None:
    """Models, demonstrations and problems of the demo of stages.  Raises ConfigError for a file of other stages."""
    named = [service for kind in ("reward", "judge") if (service := config.service_of(kind)) is not None]
    places = [service.path for service in named if service.path is not None]
    if len(places) < 2:
        raise ConfigError("the demo makes a [[service]] with kind='reward' and one with kind='judge', each at a path")
    recipe, base, (scores, judge) = stages.StagesRecipe(), config.model.path, places
    say("1/3  a tiny base model that adds, a reward model and a judge, both made of it")
    made = stages.make_base(base, recipe, _show_step)
    say(f"     base model, right in {made.accuracy:.0%} of its samples ({made.seconds:.0f} s)")
    made = stages.make_reward_model(scores, base, recipe, _show_step)
    say(f"     reward model, prefers the right answer in {made.accuracy:.0%} of pairs ({made.seconds:.0f} s)")
    made = stages.make_judge(judge, base, recipe, _show_step)
    say(f"     judge, gives the right grade in {made.accuracy:.0%} of answers ({made.seconds:.0f} s)")
    stages.write_demonstrations(config.demonstrations[0].path, NUM_DEMONSTRATIONS, recipe)
    write_dataset(data, NUM_PROBLEMS, seed=config.run.seed)
    for table in config.evaluation:
        write_dataset(table.path, NUM_HELD_OUT, seed=config.run.seed, held_out=True)


def _report(layout: RunLayout) -> None:
    """Table and curve of a run that is complete."""
    summary = json.loads(layout.summary.read_bytes())
    picture = layout.root / "learning_curve.png"
    curve = summary["reward_by_version"]
    draw_learning_curve(picture, [version for version, _, _ in curve], [mean for _, mean, _ in curve])
    print(figures_table(summary))
    print(f"curve        {as_typed(picture)}")
    print(f"TensorBoard  rlhpc tensorboard {quoted(as_typed(layout.root))}")


def _show_step(phase: str, done: int, loss: float) -> None:
    if done % SHOW_EVERY_STEPS == 0:
        say(f"     {phase}: step {done}, loss {loss:.3f}")


def say(text: str) -> None:
    """Print a line of the demo."""
    say_or_lose(text)
