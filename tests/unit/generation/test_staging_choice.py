from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.generation.weight_updates import choose_staging, free_host_bytes

GB = 10**9


@pytest.mark.parametrize(
    ("setting", "on_cpu", "model", "num_shadows", "free", "chosen"),
    [
        ("auto", True, 14 * GB, 1, 1 * GB, "shadow"),  # the model lives in host memory anyway
        ("auto", False, 14 * GB, 8, 400 * GB, "shadow"),
        ("auto", False, 145 * GB, 8, 1000 * GB, "paused"),  # eight workers would want 1.2 TB
        ("auto", False, 14 * GB, 8, 200 * GB, "paused"),
        ("shadow", False, 145 * GB, 8, 1 * GB, "shadow"),  # what was asked for
        ("paused", True, 1, 1, 400 * GB, "paused"),
    ],
)
def test_a_shadow_is_kept_where_every_worker_of_the_node_has_room_for_one(
    setting: str, on_cpu: bool, model: int, num_shadows: int, free: int, chosen: str
) -> None:
    got = choose_staging(setting, on_cpu=on_cpu, model_bytes=model, num_shadows=num_shadows, free_bytes=free)
    assert got == chosen


def cgroup(tmp_path: Path, line: str, **files: str) -> tuple[Path, Path]:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"1:cpu:/other\n{line}\n")
    for name, content in files.items():
        path = tmp_path / "groups" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "proc", tmp_path / "groups"


def test_the_limit_of_a_job_counts_though_it_is_set_above_the_task(tmp_path: Path) -> None:
    places = cgroup(
        tmp_path,
        "0::/job_7/step_0/task_1",
        job_7__memory_DOT_max="1000\n",
        job_7__memory_DOT_current="400\n",
        job_7__step_0__task_1__memory_DOT_max="max\n",
        job_7__step_0__task_1__memory_DOT_current="300\n",
    )
    assert free_host_bytes(*places) == 600


def test_the_older_kind_of_cgroup_is_read_too(tmp_path: Path) -> None:
    places = cgroup(
        tmp_path,
        "4:memory:/slurm/job_7",
        memory__slurm__job_7__memory_DOT_limit_in_bytes="5000",
        memory__slurm__job_7__memory_DOT_usage_in_bytes="6000",
    )
    assert free_host_bytes(*places) == 0


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path / "nothing", tmp_path) > 0
    places = cgroup(
        tmp_path,
        "4:memory:/x",
        memory__x__memory_DOT_limit_in_bytes=str(2**63 - 4096),
        memory__x__memory_DOT_usage_in_bytes="6000",
    )
    assert free_host_bytes(*places) > 6000
