"""Recipes are listed, copied, and say in their heads where their numbers come from and what they need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.cli import main
from launch.commands.recipes import DIRECTORY, Recipe, copy_recipe, known_recipes, num_gpus
from launch.plan.script import plan_report
from launch.plan.site_file import load_site
from rlhpc.config.file import load_config
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError
from tests.full_disk import fill, small_disk

ROOT = Path(__file__).parents[3]
SITE = ROOT / "slurm" / "sites" / "example.toml"
RECIPES = known_recipes()
GPUS_OF_A_NODE = 8
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@every_recipe
def test_a_head_says_what_it_reproduces_from_where_and_what_came_of_it(recipe: Recipe) -> None:
    assert re.fullmatch(r"\S.{20,90}\.", recipe.head[0])
    for label in ("Source", "Hardware", "Memory", "Published"):
        assert recipe.part(label).endswith((".", ").")), label


@pytest.mark.parametrize("recipe", [r for r in RECIPES.values() if r.name != "gsm8k"], ids=lambda recipe: recipe.name)
def test_a_source_is_a_file_at_a_commit_of_a_repository_and_a_paper(recipe: Recipe) -> None:
    source = recipe.part("Source")
    assert re.search(r"github\.com/[\w-]+/[\w.-]+[ ,]", source)
    assert re.search(r" at [0-9a-f]{12}\b", source), "which commit?"
    assert re.search(r"\w+\.(sh|yaml)\b", source), "which file?"
    assert re.search(r"arXiv:\d{4}\.\d{5}", source)
    assert sum(line.startswith("  - ") for line in recipe.head) >= 3, "what is not as in the source?"


@every_recipe
def test_the_hardware_of_a_head_is_that_of_its_settings(recipe: Recipe) -> None:
    train, generate = num_gpus(recipe.config)
    said = [int(number) for number in re.findall(r"\d+", recipe.part("Hardware"))]
    if recipe.name == "gsm8k":
        assert (said[0], *said[2:4]) == (train + generate, train, generate)
        return
    nodes, gpus, _, *split = said
    assert gpus == GPUS_OF_A_NODE
    assert nodes * gpus == train + generate
    assert split[:2] == [train, generate]


@every_recipe
def test_a_recipe_can_be_planned(recipe: Recipe) -> None:
    config = load_config(recipe.path, ["run.directory=/shared/project/run"])
    assert f"{sum(num_gpus(config))} GPUs" in plan_report(config, load_site(SITE))


def test_the_list_has_a_line_for_every_file_the_smallest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    files = {path.stem for path in (DIRECTORY / "recipes").glob("*.toml")}
    assert {line.split()[0] for line in lines} == {"gsm8k", *files}
    gpus = [sum(map(int, re.findall(r" (\d+) \+ (\d+) ", line)[0])) for line in lines]
    assert gpus == sorted(gpus)
    (dapo,) = (line for line in lines if line.startswith("dapo-32b "))
    assert "32 + 96" in dapo
    assert dapo.endswith(RECIPES["dapo-32b"].head[0])
    assert max(map(len, lines)) <= 120


def test_a_copy_is_the_file_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "drgrpo-1.5b"]) == 0
    assert "drgrpo-1.5b.toml" in capsys.readouterr().out
    copy = tmp_path / "drgrpo-1.5b.toml"
    assert copy.read_bytes() == RECIPES["drgrpo-1.5b"].path.read_bytes()
    copy.write_text("mine")
    assert main(["recipes", "copy", "drgrpo-1.5b", str(tmp_path)]) == EXIT_CONFIG
    assert "exists already" in capsys.readouterr().err
    assert copy.read_text() == "mine"


@pytest.mark.starts
def test_a_copy_that_did_not_fit_on_the_disk_stands_in_the_way_of_no_other(tmp_path: Path) -> None:
    with small_disk(tmp_path, 64 << 10):
        fill(tmp_path / "filler", 0)
        with pytest.raises(OSError, match="No space left"):
            copy_recipe("gsm8k", tmp_path)
        (tmp_path / "filler").unlink()
        assert copy_recipe("gsm8k", tmp_path).read_bytes() == RECIPES["gsm8k"].path.read_bytes()


def test_a_name_that_does_not_exist_is_refused_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "copy", "dapo32b"]) == EXIT_CONFIG
    said = capsys.readouterr().err
    assert said.startswith("rlhpc: recipe 'dapo32b': unknown; legal: gsm8k, ")
    assert said.endswith("(did you mean dapo-32b?)\n")


def test_a_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        copy_recipe("gsm8k", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["pipelinerl-7b", "pipelinerl-32b"])
def test_what_gradients_are_compared_with_is_divided_as_the_loss_is(name: str) -> None:
    """Their loss is a sum over tokens, aggregation = "constant" divides it, and bound and epsilon with it."""
    config = RECIPES[name].config
    assert config.algorithm.aggregation == "constant"
    longest = config.generation.max_completion_tokens
    assert config.trainer.max_grad_norm * longest == pytest.approx(0.3, rel=0.02)
    assert config.trainer.adam_eps * longest == pytest.approx(1e-8, rel=0.02)
