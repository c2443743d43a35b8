"""`rlhpc plan --predict`: what it says, where its figures come from, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.cli import main
from launch.plan.site_file import Site
from launch.prediction.measured import measure
from launch.prediction.rates import Figure
from launch.prediction.ring import PFLOP
from launch.prediction.sources import LengthOptions, lengths_of, rates_of
from rlhpc.errors import ConfigError
from rlhpc.exit_status import EXIT_CONFIG
from rlhpc.metrics.recorder import Recorder
from rlhpc.packing.cost import FlopCost
from tests.unit.launch.seen_runs import TextRun
from tests.unit.launch.site_kit import config_of, site_of

MODEL = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip
COST = FlopCost.from_hf_config(MODEL)
NOTHING = LengthOptions()
NUM_STEPS, BEGAN_S = 40, 1_790_000_000.0
SCALARS = {
    "generator/live": 2.0, "generator/idle_ratio": 0.25, "time/pack_s": 0.01, "time/wait_for_groups_s": 0.5,
    "weights/publish_s": 0.125, "time/wait_for_weights_s": 0.375, "weights/pause_s": 0.02,
    "verifier_mean_s/adding": 0.03, "time/checkpoint_s": 4.0,
}  # fmt: skip


class MeasuredRun(TextRun):
    """Engines with a step of 0.02 + 0.001 n seconds; a trainer that takes 2 ms a token; 0.05 s a step besides."""

    def __init__(self, root: Path, num_steps: int = NUM_STEPS, *, told: bool = True, in_parts: bool = False) -> None:
        """in_parts: a group at a time on two ranks, so that one waits for the other's long rollout."""
        num_ranks = 2 if in_parts else 1
        super().__init__(root, "run.name=measured", f"run.num_steps={num_steps}", f"trainer.num_ranks={num_ranks}")
        (self.model / "config.json").write_text(json.dumps(MODEL))
        groups, tokens = [], []
        for step in range(num_steps):
            batch = [self.group("2+3=", [("5" * (1 + step % 7), 1.0), ("5" * 20, 0.0)], step=step) for _ in range(2)]
            groups += [*batch, *([self.group("1+1=", [("2", 1.0), ("2", 1.0)])] if step % 4 == 0 else [])]
            tokens.append(sum(len(m.rollout.token_ids) + 4 for each in batch for m in each.group.members))
        self.seal(groups)
        self.layout.attempts.write_text(json.dumps({"index": 0, "resume_step": None, "unix_time_s": BEGAN_S}) + "\n")
        now_s = BEGAN_S + 100.0
        recorder = Recorder(self.layout.tensorboard, wall_clock=lambda: now_s)
        for step in range(num_steps):
            n, step_s = 4.0 + step % 9, 0.002 * tokens[step]
            figures = SCALARS | {"trainer/step_s": step_s, "time/step_s": 0.5 + 0.01 + step_s + 0.125 + 0.05}
            figures |= {"trainer/step_parts": 2.0 if in_parts else 1.0}
            figures |= {"generator/decoded_together": n, "generator/token_s": 0.02 + 0.001 * n} if told else {}
            now_s += figures["time/step_s"]
            recorder.step(step, figures)
        recorder.close()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> MeasuredRun:
    return MeasuredRun(tmp_path_factory.mktemp("predict") / "measured")


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A run file and a site file: the demo on GPUs whose figures are known."""
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


def test_a_measured_run_tells_what_it_was_made_of(measured: MeasuredRun) -> None:
    known = measure(measured.layout, COST)
    value = {name: figure.value for name, figure in known.figures.items()}
    assert value["engine_step_s"] == pytest.approx(0.02, rel=0.15)  # blocks of steps, not steps
    assert value["engine_step_s"] + 8 * value["engine_sample_s"] == pytest.approx(0.028, rel=0.03)
    assert known.tells_slope
    whole = value["trainer_step_s"] + value["trainer_pflop_s"] * COST(np.full(4, 20)).sum() / PFLOP
    assert whole == pytest.approx(0.002 * 4 * 20, rel=0.1)
    assert value["between_steps_s"] == pytest.approx(0.05 + 0.01)  # packing is a part of it
    assert (value["publish_s"], value["live_s"], value["save_s"]) == pytest.approx((0.125, 0.375, 4.0))
    assert (value["pause_s"], value["judge_s"]) == pytest.approx((0.02, 0.03))
    assert value["start_s"] == pytest.approx(100, abs=0.01)
    # Of the 36 steps that count, and of the time of these alone: 72 trained groups, 9 dropped ones, of 10 in all.
    assert known.lengths.dropped_share == pytest.approx(9 / 81)
    assert all(str(measured.layout.root) in figure.source for figure in known.figures.values())


def test_the_start_of_a_run_is_that_of_the_attempt_that_trained(tmp_path: Path) -> None:
    """One that failed ten hours before is no time that engines take to load."""
    run = MeasuredRun(tmp_path / "again")
    began = {0: BEGAN_S - 36_000, 1: BEGAN_S, 2: BEGAN_S + 101}
    lines = [json.dumps({"index": index, "resume_step": 9 if index == 2 else None, "unix_time_s": at})
             for index, at in began.items()]  # fmt: skip
    run.layout.attempts.write_text("\n".join([*lines, '{"index": 3, "res']))
    assert measure(run.layout, COST).figures["start_s"].value == pytest.approx(100, abs=0.01)


def test_what_parts_of_steps_leave_unfilled_is_no_slowness_of_the_trainer(tmp_path: Path) -> None:
    """The ring packs parts as the run did: a rate that held it too would count it twice."""
    run = MeasuredRun(tmp_path / "parts", in_parts=True)
    figures = measure(run.layout, COST).figures
    took_s = [0.002 * 2 * (21 + 4 + 1 + step % 7 + 1 + 4) for step in range(4, NUM_STEPS)]
    slow_ranks = 2 * float(COST(np.array([21 + 4])).sum()) / PFLOP  # of each part the long rollout
    assert figures["trainer_step_s"].value + figures["trainer_pflop_s"].value * slow_ranks == pytest.approx(
        np.mean(took_s), rel=0.02
    )


def test_groups_are_drawn_whole_with_their_fate(measured: MeasuredRun) -> None:
    """Easy prompts are short and dropped: lengths and fate drawn apart would make dropped groups too long."""
    lengths, random = measure(measured.layout, COST).lengths, np.random.default_rng(0)
    drawn = [lengths.draw(2, random) for _ in range(200)]
    assert {tuple(group.tokens) for group in drawn if not group.has_spread} == {(2, 2)}
    assert all(group.tokens[1] == 21 for group in drawn if group.has_spread)
    assert len(lengths.draw(5, random).tokens) == 5  # another group_size than the run had


def test_measured_comes_before_given_and_given_before_guessed(measured: MeasuredRun) -> None:
    config = config_of("generation.num_replicas=2")
    site = site_of(rates={"publish_s": 9.0, "prefill_token_s": 0.5})
    known = measure(measured.layout, COST)
    without, with_run = (rates_of(config, site, MODEL, each, 30) for each in (None, known))
    assert without.publish_s.source == "given: rates.publish_s of the site file"
    assert without.prefill_token_s.value == 0.5
    assert without.live_s.is_guess
    assert with_run.publish_s.value == pytest.approx(0.125)
    assert not any(figure.is_guess for figure in with_run.items().values())


def test_a_large_model_is_guessed_to_hold_up_training_longer_while_it_is_saved() -> None:
    wide = MODEL | {"hidden_size": 8192, "intermediate_size": 32_768, "num_hidden_layers": 40}
    small, large, shared = (
        rates_of(config_of(f"trainer.num_ranks={ranks}"), site_of(), model, None, 30).save_s
        for model, ranks in ((MODEL, 1), (wide, 1), (wide, 8))
    )
    assert small.value == pytest.approx(0.5, abs=0.01)
    assert (large.value - 0.5) / (shared.value - 0.5) == pytest.approx(8)
    assert large.value > 60
    assert "data sheet" in large.source


def test_more_engine_ranks_than_key_heads_read_no_cache_faster() -> None:
    """A copy of a head lies on several of them (checks/memory/engine.py counts it so)."""
    model = MODEL | {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 1}
    site = site_of()
    one, four = (
        rates_of(config_of(f"generation.tensor_parallel={ranks}"), site, model, None, 1e9).engine_sample_s.value
        for ranks in (1, 4)
    )
    assert four == pytest.approx(one, rel=1e-3)


def test_a_run_that_decoded_as_many_all_the_time_is_divided_as_the_guess_is(measured: MeasuredRun) -> None:
    known = measure(measured.layout, COST)
    told = known.figures | {"engine_step_s": Figure(0.03, "run"), "engine_sample_s": Figure(0.0, "run")}
    flat = replace(known, figures=told, tells_slope=False, decoded_together=10.0)
    guess, found = (rates_of(config_of(), site_of(), MODEL, each, 30) for each in (None, flat))
    assert found.token_s(10) == pytest.approx(0.03)
    assert found.engine_sample_s.value / found.engine_step_s.value == pytest.approx(
        guess.engine_sample_s.value / guess.engine_step_s.value
    )


def test_without_a_guess_engines_on_cpu_take_as_long_as_they_have_to_decode(measured: MeasuredRun) -> None:
    """Twice as many together, twice the time; the scripted engine sleeps as long for any number."""
    known = measure(measured.layout, COST)
    told = known.figures | {"engine_step_s": Figure(0.03, "run"), "engine_sample_s": Figure(0.0, "run")}
    flat = replace(known, figures=told, tells_slope=False, decoded_together=10.0)
    bare = Site.model_validate({"trainer": {}, "generation": {}})
    computed, slept = (
        rates_of(config_of(f"generation.engine={engine}"), bare, MODEL, flat, 30) for engine in ("vllm", "scripted")
    )
    assert computed.token_s(20) == pytest.approx(0.06)
    assert slept.token_s(20) == pytest.approx(0.03)


@pytest.mark.parametrize("names", [("engine_step_s", "engine_sample_s"), ("trainer_step_s", "trainer_pflop_s")])
def test_what_takes_no_time_at_all_is_refused(names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"rates.{names[0]}=0 and rates.{names[1]}=0: nothing is that fast"):
        rates_of(config_of(), site_of(rates=dict.fromkeys(names, 0.0)), MODEL, None, 30)


def test_what_nobody_knows_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rates.engine_step_s: missing in the site file.*generation.gpu=None"):
        rates_of(config_of(), Site.model_validate({"trainer": {}, "generation": {}}), MODEL, None, 30)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (LengthOptions(mean_tokens=0), "--mean-tokens 0: legal: 1 to generation.max_completion_tokens=52"),
        (LengthOptions(mean_tokens=53), "--mean-tokens 53"),
        (LengthOptions(law="normal"), "--length-law 'normal': legal: fixed, geometric, or lognormal:SIGMA"),
        (LengthOptions(law="lognormal:x"), "--length-law 'lognormal:x'"),
        (LengthOptions(law="fixed:2"), "--length-law 'fixed:2'"),
        (LengthOptions(dropped_share=1.0), "--dropped-share 1: legal: from 0, below 1"),
    ],
)
def test_an_option_without_a_legal_value_is_refused(options: LengthOptions, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        lengths_of(config_of(), None, options)


def test_lengths_are_measured_or_given_not_both(measured: MeasuredRun) -> None:
    with pytest.raises(ConfigError, match="--mean-tokens: --from already provides lengths"):
        lengths_of(config_of(), measure(measured.layout, COST), LengthOptions(mean_tokens=3))


def test_measured_lengths_end_where_those_of_this_run_do(measured: MeasuredRun) -> None:
    config = config_of("generation.max_prompt_tokens=4", "generation.max_completion_tokens=8")
    lengths, random = lengths_of(config, measure(measured.layout, COST), NOTHING), np.random.default_rng(0)
    drawn = [lengths.draw(2, random) for _ in range(200)]
    assert max(group.trained_tokens.max() for group in drawn) == 4 + 8
    assert lengths.mean_tokens <= 8
    assert lengths.source.endswith("% of completions cut off at 8 tokens")


def test_a_run_that_cannot_tell_is_refused_with_the_reason(tmp_path: Path) -> None:
    young = MeasuredRun(tmp_path / "young", num_steps=9)
    with pytest.raises(ConfigError, match=r"9 steps are done; legal: a run of 10 or more"):
        measure(young.layout, COST)
    old = MeasuredRun(tmp_path / "old", num_steps=12, told=False)
    with pytest.raises(ConfigError, match=r"no generator/token_s .* earlier versions"):
        measure(old.layout, COST)


@pytest.mark.parametrize("law", ["fixed", "geometric", "lognormal:0.8"])
def test_a_law_has_the_mean_that_was_given(law: str) -> None:
    config = config_of("generation.max_completion_tokens=4000", "trainer.token_budget=8000")
    lengths = lengths_of(config, None, LengthOptions(300, law, 0.25))
    random = np.random.default_rng(0)
    drawn = [lengths.draw(8, random) for _ in range(2000)]
    assert np.mean([group.tokens.mean() for group in drawn]) == pytest.approx(300, rel=0.05)
    assert np.mean([not group.has_spread for group in drawn]) == pytest.approx(0.25, abs=0.03)


# ------------------------------------------------------------------------------------------------------------- command


def test_a_run_that_waits_for_nothing_says_so_without_a_comma(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of minutes, beside which nothing else counts, on many GPUs."""
    site = Path(files[1])
    nothing = ("judge_s", "between_steps_s", "publish_s", "live_s", "pause_s", "save_s", "start_s")
    site.write_text(site.read_text() + "[rates]\n" + "".join(f"{name} = 0\n" for name in nothing))
    words = ["rates.trainer_step_s = 999.6", "rates.trainer_pflop_s = 0"]
    site.write_text(site.read_text() + "\n".join(word.removeprefix("rates.") for word in words) + "\n")
    assert main(["plan", *files, "--predict", "--mean-tokens", "1"]) == 0
    text = capsys.readouterr().out
    assert "works 100%\n" in text
    assert "1,000 s a step" in text


def test_the_text_fits_a_terminal_and_marks_what_is_guessed(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *files, "--predict"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "guessed, and perhaps off by half: 13 figures" in text
    assert "a guess: data sheet of h100" in text
    assert "2 generators, max_staleness 1" in text
    assert "GPU-hours" in text
    assert "recommended generation.num_replicas=" in text


def test_programs_get_every_figure_with_its_source(
    files: tuple[str, str], measured: MeasuredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", *files, "admission.group_size=2", "--predict", "--from", str(measured.layout.root), "--json"]
    assert main(words) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["num_steps"] == 30
    assert document["rates"]["publish_s"]["value"] == pytest.approx(0.125)
    assert not any(figure["source"].startswith("a guess") for figure in document["rates"].values())
    this = document["this_split"]
    assert this["wall_s"] == pytest.approx(document["rates"]["start_s"]["value"] + this["seconds"])
    assert this["hours"] == pytest.approx((1 + 2) * this["wall_s"] / 3600)
    assert {(each["generators"], each["max_staleness"]) for each in document["other_splits"]} >= {(1, 0), (4, 8)}
    assert document["recommended"]["max_staleness"] <= 1


def test_what_of_a_run_is_not_simulated_is_said(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *files, "--predict", "admission.oversample=0.25", "run.num_steps=4"]) == 0
    assert "admission.oversample=0.25" in capsys.readouterr().out


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
