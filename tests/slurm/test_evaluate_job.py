"""`rlhpc evaluate --site`: one job, which is what the command is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.cli import main
from rlhpc.metrics.evaluations import read_samples
from rlhpc.protocol.errors import EXIT_CONFIG
from tests.ring.run_kit import Lab, make_lab, wait_while_it_moves
from tests.slurm.submit_kit import Desk

WORDS = ["data.task=tests.ring.ring_rewards:parity", "model.dtype=float32", "generation.engine=scripted",
         "generation.max_prompt_tokens=12", "generation.max_completion_tokens=24", "--samples", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


def evaluate(desk: Desk, out: Path, site: Path, *words: str) -> int:
    where = ["--out", str(out), "--site", str(site)]
    return main(["evaluate", str(desk.lab.model), str(desk.lab.dataset), *WORDS, *where, *words])


def test_a_job_leaves_the_figures_that_the_same_command_prints(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    out = desk.lab.root / "evaluation"
    site = desk.site(common={"extra": []})
    assert evaluate(desk, out, site, "--prompts", "20", "generation.num_replicas=2") == 0
    assert "submitted job" in capsys.readouterr().err

    def story() -> str:
        return "\n".join([*desk.queued(), *(log.read_text() for log in sorted(out.glob("*.log")))])

    def trace() -> tuple[object, ...]:
        return (story(), len(list(read_samples(out))))

    wait_while_it_moves((out / "summary.json").exists, trace, "figures", story)
    wait_while_it_moves(lambda: not desk.queued(), trace, "the job's end: until then its directory is locked", story)
    summary = json.loads((out / "summary.json").read_bytes())
    assert (summary["num_prompts"], summary["samples_per_prompt"]) == (20, 2)
    words = [*WORDS, "--prompts", "20", "--out", str(out), "--json"]
    assert main(["evaluate", str(desk.lab.model), str(desk.lab.dataset), *words]) == 0
    assert json.loads(capsys.readouterr().out) == summary


def test_a_script_is_shown_and_a_job_that_cannot_be_is_refused(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    out = desk.lab.root / "not-begun"
    assert evaluate(desk, out, desk.site(), "--dry-run") == 0
    script = capsys.readouterr().out
    assert "#SBATCH --partition=gen" in script
    assert "#SBATCH --ntasks=1" in script
    assert f"-m launch.cli evaluate {desk.lab.model} {desk.lab.dataset} " in script.splitlines()[-1]
    assert evaluate(desk, out, desk.site(generation={"partition": "nowhere"})) == EXIT_CONFIG
    assert "nowhere" in capsys.readouterr().err
    assert not out.exists()
    assert desk.queued() == []
