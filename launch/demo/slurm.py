"""The demo on Slurm: a private cluster of virtual nodes, its site file, one heterogeneous job on three partitions.

Input: the demo's Config.  Output: the exit status of the run.  The cluster is in a separate temporary directory and
ends with the demo.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.commands.submit import submit_run
from launch.commands.wait_for_run import wait_for_run
from launch.dev_cluster.cluster import DevCluster
from launch.dev_cluster.packages import obtain
from launch.dev_cluster.shape import default_shape
from launch.plan.site_values import walltime_s
from rlhpc.config import Config
from rlhpc.errors import ConfigError

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
    """Start a cluster, submit the run, wait for its end.  time: limit of the job; one too short makes it requeue.

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
    """A cluster that this process's Slurm commands talk to."""
    root = Path(tempfile.mkdtemp(prefix="rlhpc-demo-", dir="/tmp"))  # sockets below it: the path has to be short
    before = dict(os.environ)
    try:
        with DevCluster.create(root, default_shape(1, 2, 1, gpus=1), obtain(), dies_with_parent=True) as cluster:
            os.environ.update(cluster.environment())
            yield cluster
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(root, ignore_errors=True)
