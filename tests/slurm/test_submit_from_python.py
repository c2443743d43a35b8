"""`rlhpc.submit`: a run as submitit's Job, in the queue, to its summary, cancelled."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from submitit.core.utils import UncompletedJobError

import rlhpc
from tests.slurm.submit_kit import Desk
from tests.unit.doc_pages import ROOT


def test_a_run_submitted_from_python_waits_in_the_queue_until_it_is_cancelled(desk: Desk) -> None:
    said: list[str] = []
    job = rlhpc.submit(desk.run_file("python"), desk.site(), ["run.seed=3"], tell=said.append)
    assert any(line.startswith("submitted ") for line in said)
    assert job.state == "PENDING"
    assert not job.done()
    assert job.stdout() is None
    assert job.run.settings["run"]["seed"] == 3
    assert job.run.phase == "new"
    job.cancel()
    with pytest.raises(UncompletedJobError, match="CANCELLED"):
        job.result()
    assert desk.queued() == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_block_of_the_page_runs_to_the_summary(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n# needs Slurm\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shutil.copy(desk.run_file("page"), tmp_path / "RUN.toml")
    shutil.copy(desk.site(common={"extra": []}), tmp_path / "site.toml")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, "docs/python.md", "exec"), names)
    job = names["job"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("6 ")
    assert job.run.phase == "complete"  # type: ignore[attr-defined]
    assert "complete" in (job.stdout() or "")  # type: ignore[attr-defined]
