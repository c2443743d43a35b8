"""What is said of a run directory that others may read or change, and of core files."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.run_directory.prepare import prepare_run_dir
from rlhpc.base.files import KEEP_CORE_FILES, openness
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import RunDirectoryError
from tests.unit.launch.site_kit import config_of


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [
        (0o700, ""),
        (0o750, "chmod 700"),
        (0o705, "chmod 700"),
        (0o711, "chmod 700"),
        (0o770, "chmod -R go-w"),
        (0o702, "chmod -R go-w"),
        (0o1777, "chmod -R go-w"),
    ],
)
def test_each_right_of_others_has_its_remedy(tmp_path: Path, mode: int, remedy: str) -> None:
    tmp_path.chmod(mode)
    text = openness(tmp_path).text
    assert bool(text) == bool(remedy)
    assert f"`{remedy}" in text or not remedy
    tmp_path.chmod(0o700)


def test_a_directory_that_is_not_there_is_open_to_nobody(tmp_path: Path) -> None:
    assert openness(tmp_path / "run").text == ""


@pytest.mark.starts
def test_a_run_makes_its_directory_for_itself_and_tells_of_one_that_others_may_read(tmp_path: Path) -> None:
    config, told = config_of(f"run.directory={tmp_path / 'run'}"), list[str]()
    layout = RunLayout(config.run_directory)
    prepare_run_dir(config, layout, resume=False, fresh=False, tell=told.append)
    assert layout.root.stat().st_mode & 0o777 == 0o700
    assert told == []
    layout.root.chmod(0o755)
    prepare_run_dir(config, layout, resume=True, fresh=False, tell=told.append)
    assert [line for line in told if "mode 0755: others may read" in line and "umask 077" in line] == told[:1]


def test_a_directory_that_others_may_change_is_refused_with_the_command_that_mends_it(tmp_path: Path) -> None:
    config = config_of(f"run.directory={tmp_path / 'run'}")
    layout = RunLayout(config.run_directory)
    layout.root.mkdir()
    layout.root.chmod(0o775)
    with pytest.raises(RunDirectoryError, match=r"mode 0775: others may change .*`chmod -R go-w "):
        prepare_run_dir(config, layout, resume=False, fresh=False)
    assert list(layout.root.iterdir()) == []


@pytest.mark.parametrize("opened", ["checkpoints", "jobs", "config.json", "rollouts/made.jsonl", "elsewhere"])
def test_what_others_may_change_in_a_directory_that_they_may_enter_is_refused_too(tmp_path: Path, opened: str) -> None:
    """`chmod -R g+rwX RUN`, and then `chmod go-w RUN`."""
    config = config_of(f"run.directory={tmp_path / 'run'}")
    layout = RunLayout(config.run_directory)
    prepare_run_dir(config, layout, resume=False, fresh=False)
    layout.jobs.mkdir()
    (layout.rollouts / "made.jsonl").touch()
    (tmp_path / "elsewhere").mkdir()
    (layout.root / "elsewhere").symlink_to(tmp_path / "elsewhere")  # scratch, perhaps
    path = layout.root / opened
    path.chmod(path.stat().st_mode | 0o070)
    prepare_run_dir(config, layout, resume=True, fresh=False)  # nobody else may enter
    layout.root.chmod(0o750)
    with pytest.raises(RunDirectoryError, match=rf"/{opened} has mode .*: others may .*`chmod -R go-w {layout.root}`"):
        prepare_run_dir(config, layout, resume=True, fresh=False)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.starts
@pytest.mark.usefixtures("open_umask")
def test_in_a_directory_that_others_may_read_they_may_write_nothing_under_any_umask(tmp_path: Path) -> None:
    config = config_of(f"run.directory={tmp_path / 'run'}")
    layout = RunLayout(config.run_directory)
    layout.root.mkdir(mode=0o755)
    prepare_run_dir(config, layout, resume=False, fresh=False)
    (layout.rollouts / "segment.h5").touch()  # as a library makes it
    assert [path for path in layout.root.rglob("*") if path.stat().st_mode & 0o022] == []


@pytest.mark.starts
@pytest.mark.parametrize(("environment", "is_none"), [({}, True), ({KEEP_CORE_FILES: "1"}, False)])
def test_a_process_with_keys_leaves_no_core_file_unless_it_is_asked_to(
    environment: dict[str, str], is_none: bool
) -> None:
    """The hard limit stays, so that its user can still ask for one."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    code = (
        "import resource, rlhpc.base.files as p; h = resource.getrlimit(resource.RLIMIT_CORE)[1]; "
        "resource.setrlimit(resource.RLIMIT_CORE, (h, h)); p.leave_no_core_file(); "
        "print(*resource.getrlimit(resource.RLIMIT_CORE))"
    )
    command = [sys.executable, "-c", code]
    root = str(Path(__file__).parents[2])
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=root).stdout.split()
    assert out == ["0" if is_none else str(hard), str(hard)]
