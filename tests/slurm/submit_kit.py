"""Runs to submit on a dev cluster: a lab, a site file, the command line turned towards the cluster."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.cli import main
from launch.private_slurm.cluster import DevCluster
from launch.run_directory.prepare import prepare_run_dir_for_jobs
from launch.run_files.records import JobRecord, read_job_records, write_job_record
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config
from tests.ring.run_kit import ROOT, Lab
from tests.slurm.cluster_kit import submit
from tests.slurm.healing import restore

LATER = "--begin=now+1hour"  # jobs that stay in the queue


@dataclass(frozen=True, slots=True)
class Desk:
    """Where runs of a test are submitted from."""

    cluster: DevCluster
    lab: Lab

    def site(self, **sections: dict[str, Any]) -> Path:
        """Write a site file of the cluster; keys given as `section={key: value}` are put over it."""
        document: dict[str, dict[str, Any]] = {
            "cluster": {"name": "dev", "shared_directory": str(self.lab.root)},
            "common": {"time": "0:10:00", "extra": [LATER]},
            "controller": {"partition": "cpu"},
            "trainer": {"partition": "train"},
            "generation": {"partition": "gen"},
            "prologue": {"python": sys.executable, "code": str(ROOT)},
        }
        for name, keys in sections.items():
            document[name] = document.get(name, {}) | keys
        path = self.lab.root / f"site-{time.monotonic_ns()}.toml"
        lines = [
            line
            for name, keys in document.items()
            for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()))
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def submit(self, name: str, site: Path, *words: str) -> int:
        """`rlhpc submit` of a small run; returns its exit status."""
        return main(["submit", str(self.run_file(name)), str(site), *words])

    def run_file(self, name: str) -> Path:
        """Sockets between machines, two generators."""
        return self.lab.run_file(
            name,
            generation={"num_replicas": 2},
            transport={"kind": "tcp"},
        )

    def queued(self) -> list[str]:
        """Ids in the queue, an array task or a component a line."""
        return sorted(self.cluster.run("squeue", "--noheader", "--array", "--format=%i").split())

    def clear(self) -> None:
        """Leave the cluster without jobs."""
        restore(self.cluster)

    def recorded(self, name: str, *jobs: tuple[str, str, tuple[str, ...]]) -> RunLayout:
        """A prepared run with jobs of the test's own: (name in the plan, lines of sh, options of sbatch)."""
        layout = self.lab.layout(name)
        prepare_run_dir_for_jobs(load_config(self.run_file(name)), layout, resume=False, fresh=False)
        for number, (job, script, options) in enumerate(jobs):
            job_id = submit(self.cluster, script, f"--job-name={name}", *options)
            write_job_record(layout, JobRecord(job_id, job, "jobs", None, "", "", False, 0, 0, None, float(number)))
        return layout


def ids_of(layout: RunLayout) -> dict[str, int]:
    """Recorded ids by the names of jobs."""
    return {record.name: record.job_id for record in read_job_records(layout)}
