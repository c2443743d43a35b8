"""What the prologue of a site file names and this machine lacks is told by `check --site`, `plan` and `--dry-run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cli import main
from launch.doctor.site import refuse_missing_software, software_not_here
from launch.plan.site_file import Site
from rlhpc.protocol.errors import ConfigError
from tests.ring.run_kit import Lab, make_lab, quick_settings, to_toml
from tests.unit.launch.site_kit import ROOT, site_of


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


def site_with(shared: Path, **prologue: str) -> Site:
    return site_of(cluster={"shared_directory": str(shared)}, prologue=prologue)


@pytest.mark.parametrize(
    ("key", "named", "file"),
    [
        ("conda", "conda", "conda/etc/profile.d/conda.sh"),
        ("venv", "env", "env/bin/activate"),
        ("code", "checkout", "checkout/launch/__init__.py"),
    ],
)
def test_a_path_of_the_prologue_that_is_not_here_is_told(tmp_path: Path, key: str, named: str, file: str) -> None:
    site = site_with(tmp_path, **{key: str(tmp_path / named)})
    (line,) = software_not_here(site)
    assert line.startswith(f"prologue    warning: prologue.{key}={str(tmp_path / file)!r}: ")
    assert " is not here; legal: a path that nodes see too" in line
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    assert software_not_here(site) == []


@pytest.mark.parametrize(
    ("key", "named"), [("venv", "env"), ("conda", "conda"), ("image", "image.sif"), ("python", "env/bin/python")]
)
def test_what_the_prologue_names_in_the_shared_directory_and_is_not_there_is_refused(
    tmp_path: Path, key: str, named: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    code = {"code": str(ROOT)} if key == "image" else {}
    with pytest.raises(ConfigError, match=rf"^prologue\.{key}=.*{named}.*is not here; legal: a path that nodes"):
        refuse_missing_software(site_with(shared, **code, **{key: str(shared / named)}))
    (line,) = refuse_missing_software(site_with(shared, **code, **{key: f"/opt/{named}"}))  # nodes may have it
    assert line.startswith(f"prologue    warning: prologue.{key}=")


def test_an_environment_of_conda_that_is_a_path_is_looked_at_too(tmp_path: Path) -> None:
    (tmp_path / "etc" / "profile.d").mkdir(parents=True)
    (tmp_path / "etc" / "profile.d" / "conda.sh").touch()
    (line,) = software_not_here(site_with(tmp_path, conda=str(tmp_path), conda_environment="/nowhere/mine"))
    assert "prologue.conda_environment='/nowhere/mine'" in line
    assert software_not_here(site_with(tmp_path, conda=str(tmp_path), conda_environment="mine")) == []


def test_on_a_machine_that_is_none_of_the_clusters_nothing_is_looked_at() -> None:
    assert software_not_here(site_with(Path("/no/such/filesystem"), conda="/no/such/filesystem/conda")) == []


@pytest.mark.parametrize("command", [["check"], ["plan"], ["submit", "--dry-run"]], ids=" ".join)
def test_commands_that_only_look_tell_it(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    run_file, site_file = tmp_path / "run.toml", tmp_path / "site.toml"
    settings = quick_settings(lab, "looked-at")
    settings["run"]["directory"] = str(tmp_path / "runs" / "looked-at")
    run_file.write_text(to_toml(settings), encoding="utf-8")
    site_file.write_text(
        f'[cluster]\nshared_directory = "{tmp_path}"\n[common]\ntime = 60\n[trainer]\n[generation]\n'
        f'[prologue]\nconda = "{tmp_path}/miniconda"\n'
    )
    site = ["--site", str(site_file)] if command == ["check"] else [str(site_file)]
    assert main([*command, str(run_file), *site]) == 0
    assert "prologue    warning: prologue.conda=" in capsys.readouterr().out
