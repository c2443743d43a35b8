"""`rlhpc plan --predict`: the formula against recorded runs, where its figures come from, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.commands.predict import Figure, Rates, Split, other_splits, pace_of, rates_of
from launch.plan.site_file import Site
from rlhpc.metrics.tensorboard import Recorder
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError
from tests.unit.launch.seen_runs import TextRun
from tests.unit.launch.site_kit import config_of, site_of

MODEL = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip
NO_GPUS = Site.model_validate({"trainer": {}, "generation": {}})
NUM_STEPS = 40
SCALARS = {
    "time/wait_for_groups_s": 0.5, "trainer/step_s": 0.4, "time/step_s": 1.2, "time/wait_for_weights_s": 1.0,
    "time/checkpoint_s": 4.0, "weights/pause_s": 0.02, "generator/token_s": 0.03, "generator/decoded_together": 10.0,
    "length/prompt_mean": 5.0, "length/completion_mean": 20.0, "length/completion_max": 40.0,
    "reward/zero_spread_share": 0.25, "verifier_mean_s/adding": 0.03, "verifier_mean_s/code": 0.05,
}  # fmt: skip


class MeasuredRun(TextRun):
    """A run whose steps took longer while it compiled; two data-parallel ranks train 200 tokens a step."""

    def __init__(self, root: Path, num_steps: int = NUM_STEPS, *, left_out: str = "") -> None:
        super().__init__(root, f"run.num_steps={num_steps}", "trainer.num_ranks=2")
        recorder = Recorder(self.layout.tensorboard)
        for step in range(num_steps):
            slow = 100.0 if step < num_steps // 10 else 1.0
            figures = {name: value * slow if name.endswith("_s") else value for name, value in SCALARS.items()}
            figures.pop(left_out, None)
            recorder.step(step, figures | {"tokens/trained_total": 200.0 * (step + 1)})
        recorder.close()


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A run file and a site file: GPUs whose figures are known."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    run, site = tmp_path / "RUN.toml", tmp_path / "site.toml"
    run.write_text(
        f'[run]\nname = "r"\nnum_steps = 30\n[model]\npath = "{model}"\n'
        '[data]\npath = "d.jsonl"\ntask = "math_answer"\n'
        "[generation]\nmax_prompt_tokens = 64\nmax_completion_tokens = 200\nnum_replicas = 2\nmax_num_seqs = 16\n"
        "[admission]\ngroups_per_step = 4\ngroup_size = 4\nmax_staleness = 1\n[trainer]\ntoken_budget = 4096\n"
    )
    site.write_text('[trainer]\ngpu = "h100"\ngpus_per_node = 8\n[generation]\ngpu = "h100"\ngpus_per_node = 8\n')
    return str(run), str(site)


# ------------------------------------------------------------------------------------------------------------- formula

# Runs of real processes whose engines and trainer sleep: tests/ring/timed_runs.py, 24 rollouts of 28 tokens a step and
# 64 at most, 8 at once a generator, a token each 0.02 s; generators, S, and the seconds a step that were measured.
RECORDED = [(1, 1, 2.13), (1, 0, 3.77), (2, 1, 1.475), (2, 4, 1.114), (4, 2, 0.959)]
TIMED = ("generation.max_num_seqs=8", "admission.groups_per_step=6", "admission.group_size=4", "trainer.num_ranks=1")
# The trainer's rate, what happens between steps included, and the share of groups to be sampled again are of the first.
TIMED_RATES = Rates(
    engine_step_s=0.02, engine_sample_s=0.0, judge_s=0.0, trainer_tokens_per_s=24 * 33 / 0.915, between_steps_s=0.0,
    live_s=0.1, pause_s=0.0, save_s=0.0, prompt_tokens=5.0, mean_tokens=28.0, longest_tokens=64.0, dropped_share=0.2,
)  # fmt: skip


@pytest.mark.parametrize(("generators", "max_staleness", "measured_s"), RECORDED)
def test_recorded_runs_took_as_long_as_the_formula_says(generators: int, max_staleness: int, measured_s: float) -> None:
    pace = pace_of(config_of(*TIMED, "admission.step_parts=1"), TIMED_RATES, Split(generators, 1, max_staleness))
    assert pace.step_s == pytest.approx(measured_s, rel=0.08)


def test_each_stage_can_be_the_bottleneck_and_more_of_it_helps() -> None:
    config, split = config_of(*TIMED), Split(2, 1, 8)
    slow = {
        "generation": replace(TIMED_RATES, engine_step_s=1.0, longest_tokens=28.0),
        "rewards": replace(TIMED_RATES, judge_s=1.0),
        "training": replace(TIMED_RATES, trainer_tokens_per_s=10.0),
    }
    for stage, rates in slow.items():
        assert pace_of(config, rates, split).bottleneck == stage
    more = {"generation": Split(4, 1, 8), "training": Split(2, 2, 8)}
    for stage, other in more.items():
        both = [pace_of(config, slow[stage], each).step_s for each in (split, other)]
        assert both[1] == pytest.approx(both[0] / 2, rel=0.05)
    assert pace_of(config, TIMED_RATES, replace(split, max_staleness=0)).bottleneck == "staleness"


def test_more_places_than_groups_in_flight_are_not_used() -> None:
    """The bound limits what is in flight: of 24 rollouts at S = 0, eight generators decode three each."""
    config, rates = config_of(*TIMED), replace(TIMED_RATES, dropped_share=0.0)
    four, eight = (pace_of(config, rates, Split(number, 1, 0)).stages_s["generation"] for number in (4, 8))
    assert four == eight == pytest.approx(28 * 0.02)


def test_all_splits_have_as_many_gpus_and_the_best_is_balanced() -> None:
    """Four GPUs a rank and two a generator: of 16, two ranks and four generators if both stages cost the same."""
    config = config_of(*TIMED, "generation.num_replicas=6", "admission.max_staleness=8")
    rates = replace(TIMED_RATES, longest_tokens=28.0, dropped_share=0.0, trainer_tokens_per_s=24 * 33 / 0.84)
    splits = other_splits(config, rates, 4, 2)
    assert {(pace.split.data_parallel, pace.split.generators) for pace in splits} == {(1, 6), (2, 4), (3, 2)}
    assert splits[0].split == Split(4, 2, 8)


# ------------------------------------------------------------------------------------------------------------- figures


def test_a_measured_run_gives_every_figure(tmp_path: Path) -> None:
    run = MeasuredRun(tmp_path / "measured")
    found = rates_of(config_of("generation.max_completion_tokens=30"), NO_GPUS, MODEL, run.layout, {})
    assert all(figure.source.startswith(f"{run.layout.root}, steps 4 to 39") for figure in found.values())
    assert {name: figure.value for name, figure in found.items()} == pytest.approx(
        {
            "engine_step_s": 0.0, "engine_sample_s": 0.003, "judge_s": 0.04, "trainer_tokens_per_s": 200 / 0.4 / 2,
            "between_steps_s": 0.2, "live_s": 1.0, "pause_s": 0.02, "save_s": 4.0, "prompt_tokens": 5.0,
            "mean_tokens": 20.0, "longest_tokens": 30.0, "dropped_share": 0.25,
        }
    )  # fmt: skip


def test_what_a_run_has_not_written_is_guessed(tmp_path: Path) -> None:
    run = MeasuredRun(tmp_path / "measured", left_out="reward/zero_spread_share")
    found = rates_of(config_of(), NO_GPUS, MODEL, run.layout, {})
    assert found["dropped_share"] == Figure(0.2, "a guess: 0.2 anywhere")


def test_measured_comes_before_given_and_given_before_guessed(tmp_path: Path) -> None:
    run, config = MeasuredRun(tmp_path / "measured"), config_of()
    site = site_of(rates={"live_s": 9.0, "trainer_tokens_per_s": 7.0})
    without, measured = (rates_of(config, site, MODEL, each, {}) for each in (None, run.layout))
    assert without["live_s"] == Figure(9.0, "given: rates.live_s of the site file")
    assert without["engine_step_s"].source == "a guess: data sheet of h100"
    assert measured["live_s"].value == pytest.approx(1.0)
    # The measured time between tokens is divided as the guess is.
    step, sample = (measured[name].value for name in ("engine_step_s", "engine_sample_s"))
    assert step + 10 * sample == pytest.approx(0.03)
    assert sample / step == pytest.approx(
        without["engine_sample_s"].value / without["engine_step_s"].value,
        rel=0.05,  # of other lengths
    )


def test_more_engine_ranks_than_key_heads_read_no_cache_faster() -> None:
    """A copy of a head lies on several of them (checks/memory/engine.py counts it so)."""
    model = MODEL | {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 1}
    long = ("generation.max_prompt_tokens=100000000", "trainer.token_budget=200000000")
    one, four = (
        rates_of(
            config_of(f"generation.tensor_parallel={ranks}", *long), site_of(), model, None, {},
        )["engine_sample_s"].value
        for ranks in (1, 4)
    )  # fmt: skip
    assert four == pytest.approx(one, rel=1e-2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mean_tokens": 0.0}, "--mean-tokens 0: legal: 1 to generation.max_completion_tokens=52"),
        ({"mean_tokens": 53.0}, "--mean-tokens 53"),
        ({"dropped_share": 1.0}, "--dropped-share 1: legal: from 0, below 1"),
    ],
)
def test_an_option_without_a_legal_value_is_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rates_of(config_of(), site_of(), MODEL, None, options)


def test_a_run_that_cannot_be_measured_is_refused_with_the_reason(tmp_path: Path) -> None:
    run = MeasuredRun(tmp_path / "young", num_steps=9)
    with pytest.raises(ConfigError, match=r"9 steps are done; legal: a run of 10 or more"):
        rates_of(config_of(), site_of(), MODEL, run.layout, {})
    with pytest.raises(ConfigError, match="--from already provides them"):
        rates_of(config_of(), site_of(), MODEL, run.layout, {"mean_tokens": 3.0})


def test_what_nobody_knows_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rates.engine_step_s: missing in the site file.*generation.gpu=None"):
        rates_of(config_of(), NO_GPUS, MODEL, None, {})


# ------------------------------------------------------------------------------------------------------------- command


def test_people_read_stages_bottleneck_and_what_is_guessed(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *files, "--predict", "run.deterministic=true"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for said in ("12 figures are guessed", "a guess: data sheet of h100", "bottleneck  ", "hours of 3 GPUs",
                 "run.deterministic=true", "recommended "):  # fmt: skip
        assert said in text


def test_programs_get_every_figure_with_its_source(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MeasuredRun(tmp_path / "measured")
    assert main(["plan", *files, "--predict", "--from", str(run.layout.root), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["rates"]["live_s"]["value"] == pytest.approx(1.0)
    this = document["this_split"]
    assert document["seconds"] == pytest.approx(30 * this["step_s"])
    assert document["hours"] == pytest.approx((1 + 2) * document["seconds"] / 3600)
    assert this["step_s"] == max(stage["step_s"] for stage in document["stages"].values())
    assert this in document["other_splits"]
    assert document["recommended"]["step_s"] <= this["step_s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "runs/first"], "--from: legal with --predict only"),
        (["--json"], "--json: legal with --predict only"),
        (["--predict", "--from", "nowhere"], "nowhere: not a run directory"),
        (["--predict", "model.path=nowhere"], "nowhere': no config.json there; its sizes are needed"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_a_line(
    files: tuple[str, str], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *files, *words]) == EXIT_CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
