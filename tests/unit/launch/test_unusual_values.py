"""Usual values of keys, and who warns of others; tests/golden/mistakes.md shows the warnings of `rlhpc check`."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from launch.checks.bias import unusual
from launch.cli import main
from rlhpc.config.file import load_config, sections
from rlhpc.config.setting import AnySize, Usual, marks_of
from tests.ring.run_kit import Lab, make_lab
from tests.unit.doc_pages import ROOT
from tests.unit.launch.bad_inputs.desk import SITE, Desk

FIELDS = {
    f"{section}.{key}": field for section, model in sections().items() for key, field in model.model_fields.items()
}

RUN_FILES = [
    path
    for path in (*sorted((ROOT / "configs").rglob("*.toml")), *sorted((ROOT / "examples").glob("*.toml")))
    if "[trainer]" in path.read_text(encoding="utf-8") and "[cluster]" not in path.read_text(encoding="utf-8")
]


def numbers(annotation: object) -> list[tuple[object, list[object]]]:
    """Return type and constraints of each number among the alternatives of a type."""
    if annotation in (int, float):
        return [(annotation, [])]
    if typing.get_origin(annotation) is typing.Annotated:
        base, *more = typing.get_args(annotation)
        own = [each for one in more for each in (one.metadata if isinstance(one, FieldInfo) else (one,))]
        return [(kind, [*inner, *own]) for kind, inner in numbers(base)]
    return [each for one in typing.get_args(annotation) for each in numbers(one)]


def is_open(field: FieldInfo) -> bool:
    """Whether a number may be as large as it likes, or as near to 0."""
    for kind, inner in numbers(field.annotation):
        own = [*field.metadata, *inner]
        has_top = any(isinstance(each, Le | Lt) for each in own)
        has_floor = any(
            isinstance(each, Ge) or (isinstance(each, Gt) and (kind is int or each.gt != 0)) for each in own
        )
        if not (has_top and has_floor):
            return True
    return False


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def desk(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk(lab, tmp_path)


def test_only_keys_that_hold_numbers_have_usual_values() -> None:
    marked = [key for key, field in FIELDS.items() if marks_of(field, Usual)]
    assert len(marked) > 100
    assert [key for key in marked if not numbers(FIELDS[key].annotation)] == []


def test_every_number_without_a_bound_on_some_side_has_usual_values_or_is_excused() -> None:
    for key, field in FIELDS.items():
        marks = (*marks_of(field, Usual), *marks_of(field, AnySize))
        assert len(marks) <= 1, key
        assert marks or not is_open(field), key


def test_every_default_is_usual() -> None:
    odd = {
        key: field.default
        for key, field in FIELDS.items()
        for usual in marks_of(field, Usual)
        if isinstance(field.default, int | float) and field.default not in usual
    }
    assert odd == {}


@pytest.mark.parametrize("run_file", RUN_FILES, ids=lambda path: path.name)
def test_run_files_of_ours_have_usual_values(run_file: Path) -> None:
    assert unusual(load_config(run_file)) == []


def test_values_among_several_are_named_with_their_place(desk: Desk) -> None:
    one, two = ({"path": "train.jsonl", "task": "regex", "name": name} for name in ("a", "b"))
    desk.settings["data"] = [one, two | {"weight": 1e-30}]
    desk.write_run_file()
    assert [line.partition(" is unusual")[0] for line in unusual(load_config(desk.run_file))] == ["data.1.weight=1e-30"]


def test_a_local_run_warns_before_it_makes_anything(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.settings["algorithm"] = {"kl_coefficient": 100.0}
    desk.write_run_file()
    (desk.root / "runs" / "first").mkdir(parents=True)
    (desk.root / "runs" / "first" / "notes.txt").write_text("not a run")  # so that the run is refused afterwards
    assert main(["run", "run.toml"]) != 0
    assert "warning: algorithm.kl_coefficient=100 is unusual (usual: 1e-6 to 1, or 0)" in capsys.readouterr().err


def test_a_submission_warns_before_it_asks_slurm(
    desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(desk.root))  # no sbatch
    desk.settings["algorithm"] = {"kl_coefficient": 100.0}
    desk.write_run_file()
    (desk.root / "site.toml").write_text(f'{SITE}[common]\ntime = "1:00:00"\n')
    assert main(["submit", "run.toml", "site.toml"]) != 0
    said = capsys.readouterr()
    assert "warning     algorithm.kl_coefficient=100 is unusual (usual: 1e-6 to 1, or 0)" in said.out + said.err
