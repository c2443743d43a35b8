"""Whole evaluations by `rlhpc evaluate`, with all their processes: to the end, killed, interrupted, failing."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from launch.commands.arguments import takes_evaluation
from launch.evaluate import follow
from launch.supervisor.role_task import MAX_STARTS
from launch.view.run import RunView
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import with_values
from rlhpc.data.prompts import open_prompts
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.metrics.evaluations import EvaluationSettings, read_samples, read_settings
from rlhpc.protocol.errors import EXIT_CONFIG, EXIT_INTERRUPTED
from tests.ring.run_kit import Lab, Run, command_environment, make_lab, rlhpc, run_to_the_end, wait_while_it_moves
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.data.checkpoints import CHATML, SPECIAL_TOKENS, make_tokenizer_files

pytestmark = pytest.mark.ring
PROMPTS, SAMPLES = 12, 4
SETTINGS = ["data.task=tests.ring.ring_rewards:parity", "generation.max_prompt_tokens=12", "model.dtype=float32"]
SCRIPTED = [*SETTINGS, "generation.engine=scripted", "generation.max_completion_tokens=24"]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return make_lab(tmp_path)


def words_of(lab: Lab, out: str, *words: str) -> list[str]:
    how = ["--samples", str(SAMPLES), "--prompts", str(PROMPTS), "--out", str(lab.root / out)]
    return ["evaluate", str(lab.model), str(lab.dataset), *how, *words]


def slow_down(lab: Lab, token_s: float) -> None:
    lab.script_engine(token_s=token_s)


def completions(directory: Path) -> dict[tuple[int, int], str]:
    return {(each.prompt, each.sample): each.completion for each in read_samples(directory)}


def drawn(directory: Path) -> Counter[tuple[int, int]]:
    return Counter((each.prompt, each.sample) for each in read_samples(directory))


@contextmanager
def started(words: list[str], stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """The command; everything that it has started ends with the block."""
    command = [sys.executable, "-m", "launch.cli", *words]
    with subprocess.Popen(
        command, text=True, stdout=stdout, stderr=subprocess.PIPE, env=command_environment()
    ) as process:
        try:
            yield process
        finally:
            for each in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
                each.kill()
            process.kill()


def wait_for_samples(directory: Path, number: int) -> None:
    def there() -> int:
        return len(list(read_samples(directory))) if directory.exists() else 0

    wait_while_it_moves(lambda: there() >= number, there, "samples", lambda: str(there()))


def evaluators(directory: Path) -> list[psutil.Process]:
    """Processes that work in this directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        found += [process] if "rlhpc.roles.evaluator" in words and str(directory) in words else []
    return found


def followers(run_directory: Path) -> list[psutil.Process]:
    """Commands that follow this run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        found += [process] if "--follow" in words and str(run_directory) in words else []
    return found


@pytest.mark.long
def test_two_processes_draw_what_one_draws_and_the_same_command_again_draws_nothing(lab: Lab) -> None:
    alone = rlhpc(*words_of(lab, "one", *SCRIPTED, "--json"))
    assert alone.returncode == 0, alone.stderr
    together = rlhpc(*words_of(lab, "two", *SCRIPTED, "generation.num_replicas=2", "--json"))
    assert together.returncode == 0, together.stderr
    assert (
        json.loads(together.stdout)
        == json.loads(alone.stdout)
        == json.loads((lab.root / "one/summary.json").read_text())
    )
    assert completions(lab.root / "two") == completions(lab.root / "one")
    assert set(drawn(lab.root / "two").values()) == {1}
    assert len(drawn(lab.root / "two")) == PROMPTS * SAMPLES
    assert {path.name for path in (lab.root / "two").glob("samples-*")} == {"samples-0.jsonl", "samples-1.jsonl"}
    again = rlhpc(*words_of(lab, "two", *SCRIPTED, "--json"))
    assert again.stdout == together.stdout
    more = rlhpc(*words_of(lab, "two", *SCRIPTED, "--samples", "5", "--json"))
    assert json.loads(more.stdout)["samples_per_prompt"] == 5
    assert len(drawn(lab.root / "two")) == PROMPTS * 5
    assert set(drawn(lab.root / "two").values()) == {1}


@pytest.mark.long
def test_dialogues_are_evaluated_turn_by_turn_and_a_killed_evaluation_draws_them_alike(lab: Lab) -> None:
    make_tiny_checkpoint(lab.model, vocabulary=len(SPECIAL_TOKENS) + 96)
    (lab.model / "chat_template.jinja").unlink()
    make_tokenizer_files(lab.model, chat_template=CHATML)
    lab.dataset.write_text(
        "".join(json.dumps({"prompt": "hello", "name": f"n{n}", "answer": "1"}) + "\n" for n in range(PROMPTS))
    )
    talking = [
        "data.task=environment", "data.environment=tests.unit.rewards.sample_environments:Talking",
        "data.use_chat_template=true", "environment.max_turns=3", "environment.max_turn_tokens=9",
        "model.dtype=float32", "generation.max_prompt_tokens=60", "generation.max_completion_tokens=400",
        "generation.engine=scripted",
    ]  # fmt: skip
    done = rlhpc(*words_of(lab, "talks", *talking, "--json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["figures"]["reward"]["value"] == 1.5  # half of one for each of three turns
    samples = list(read_samples(lab.root / "talks"))
    assert len(samples) == PROMPTS * SAMPLES
    assert all("go, n" in each.completion and "3: " not in each.completion for each in samples)
    assert all(each.parts == {"n": 3.0} for each in samples)
    path = lab.root / "talks" / "samples-0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    before = completions(lab.root / "talks")
    assert rlhpc(*words_of(lab, "talks", *talking)).returncode == 0
    assert completions(lab.root / "talks") == {(each.prompt, each.sample): each.completion for each in samples}
    assert len(before) == 5


def ended_in_the_middle(words: list[str], directory: Path, after: int, number: signal.Signals) -> tuple[int, str]:
    """Exit status and words of a command that gets a signal once `after` samples are there."""
    with started(words) as process:
        wait_for_samples(directory, after)
        process.send_signal(number)
        _, said = process.communicate()
        wait_while_it_moves(lambda: not evaluators(directory), lambda: len(evaluators(directory)), "ends", lambda: said)
    return process.returncode, said


@pytest.mark.long
@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGKILL,),
        (signal.SIGINT, signal.SIGTERM),
    ],
)
def test_after_its_end_in_the_middle_the_same_command_draws_what_is_missing(
    lab: Lab, numbers: tuple[signal.Signals, ...]
) -> None:
    whole = rlhpc(*words_of(lab, "whole", *SCRIPTED))
    assert whole.returncode == 0, whole.stderr
    slow_down(lab, 0.05)
    directory = lab.root / "cut"
    # The slowness stands in config.json, which is part of what a model is.
    words = words_of(lab, "cut", *SCRIPTED, "generation.num_replicas=2", "generation.max_num_seqs=4")
    for number in numbers:
        num_before = len(drawn(directory)) if directory.exists() else 0
        status, said = ended_in_the_middle(words, directory, num_before + 5, number)
        before = drawn(directory)
        assert num_before + 5 <= len(before) < PROMPTS * SAMPLES
        if number is signal.SIGKILL:
            assert status == -number
        else:
            assert status == EXIT_INTERRUPTED
            what = f"{len(before)} of {PROMPTS * SAMPLES} samples are in {directory}"
            assert f"{what}; the same command draws the others" in said
    assert rlhpc(*words).returncode == 0
    assert set(drawn(directory).values()) == {1}
    assert completions(directory) == completions(lab.root / "whole")


@pytest.mark.long
def test_a_process_that_fails_ends_the_command_which_says_why(lab: Lab) -> None:
    slow_down(lab, 0.05)
    directory = lab.root / "failed"
    with started(
        words_of(lab, "failed", *SCRIPTED, "generation.num_replicas=2", "generation.max_num_seqs=4")
    ) as process:
        wait_for_samples(directory, 1)
        evaluators(directory)[0].kill()
        _, said = process.communicate()
    assert process.returncode == EXIT_CONFIG
    assert "ended with signal 9" in said
    assert "evaluator-" in said
    assert not evaluators(directory)


@pytest.mark.long
def test_a_process_that_somebody_ends_alone_ends_the_command_which_says_how_to_go_on(lab: Lab) -> None:
    """As a guard of the machine's memory does, with SIGTERM first."""
    slow_down(lab, 0.05)
    directory = lab.root / "ended"
    with started(words_of(lab, "ended", *SCRIPTED, "generation.max_num_seqs=4")) as process:
        wait_for_samples(directory, 1)
        evaluators(directory)[0].terminate()
        _, said = process.communicate()
    assert process.returncode == EXIT_CONFIG
    assert "its processes were asked to end; the same command draws the other samples" in said
    assert "Traceback" not in said


def test_what_no_verifier_can_judge_is_counted_and_left_out(lab: Lab) -> None:
    found = rlhpc(*words_of(lab, "out", *SCRIPTED, "data.task=tests.ring.ring_rewards:fail", "--json"))
    assert found.returncode == 0, found.stderr
    summary = json.loads(found.stdout)
    assert summary["figures"] == {}
    assert summary["num_not_judged"] == PROMPTS * SAMPLES


def greedy_completions(model: Path, settings: EvaluationSettings) -> list[str]:
    """By transformers, of an HF checkpoint."""
    config = with_values(settings.config, {"model.path": model})
    prompts, tokenizer = open_prompts(config), PromptTokenizer(model)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for place in range(settings.num_prompts):
        prompt = torch.tensor([[*map(int, prompts.peek(place).token_ids)]])
        drawn = hf.generate(prompt, max_new_tokens=config.generation.max_completion_tokens, do_sample=False,
                            eos_token_id=list(tokenizer.stop_token_ids), pad_token_id=0)  # fmt: skip
        token_ids = drawn[0, prompt.shape[1] :].tolist()
        has_ended = token_ids[-1] in tokenizer.stop_token_ids
        found.append(tokenizer.decode_completion(token_ids, has_ended=has_ended))
    return found


@pytest.mark.vllm
@pytest.mark.long
def test_a_run_s_checkpoint_is_the_model_that_it_exports(lab: Lab) -> None:
    layout = run_to_the_end(lab, "trained", trainer={"learning_rate": 0.01, "ema_decay": 0.5})
    exported, averaged, out = lab.root / "exported", lab.root / "averaged", lab.root / "of-run"
    assert rlhpc("export", str(layout.root), str(exported)).returncode == 0
    assert rlhpc("export", str(layout.root), str(averaged), "--ema").returncode == 0
    newest, average = (place / "model.safetensors" for place in (exported, averaged))
    assert newest.stat().st_size == average.stat().st_size
    assert newest.read_bytes() != average.read_bytes()
    words = [*SETTINGS, "generation.engine=vllm", "generation.max_completion_tokens=8", "--prompts", "6", "--json"]
    greedy = ["--temperature", "0", "--out", str(out)]
    done = rlhpc("evaluate", str(layout.root), str(lab.dataset), *words, *greedy)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["title"] == "trained-step_000006 on train"
    assert not (out / "model").exists()
    settings = read_settings(out)
    assert settings is not None
    found = [each.completion for each in sorted(read_samples(out), key=lambda each: each.prompt)]
    assert found == greedy_completions(exported, settings)
    assert found != greedy_completions(lab.model, settings)


# ------------------------------------------------------------------------------------------------------------- adapters

OF_ADAPTERS = ["generation.engine=vllm", "generation.max_num_seqs=4", "--samples", "3", "--prompts", "8"]


@pytest.mark.vllm
@pytest.mark.long
def test_adapters_on_one_engine_draw_what_each_draws_alone_and_one_that_is_damaged_holds_up_no_other(lab: Lab) -> None:
    """Killed in the middle, and continued when one of them has lost a bit; then as directories that PEFT reads."""
    lora = {"rank": 4, "learning_rate": 0.05}
    often = {"every_steps": 1, "keep": 3}
    layout = run_to_the_end(lab, "adapted", lora=lora, run={"num_steps": 3}, checkpoint=often)
    words = ["evaluate", str(layout.root), str(lab.dataset), *OF_ADAPTERS, "--json"]
    slow = "data.task=tests.ring.ring_rewards:very_slow_parity"
    places = [layout.evaluations / f"adapted-step_{step:06d}-train" for step in (1, 2, 3)]
    status, _ = ended_in_the_middle([*words, slow, "--steps", "all"], places[1], 4, signal.SIGKILL)
    before = [drawn(place) for place in places]
    assert status == -signal.SIGKILL
    assert len(before[0]) >= 20
    assert 4 <= len(before[1]) < 24

    damaged = layout.checkpoint(2) / "trainer" / "weights-00001.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    together = rlhpc(*words, slow, "--steps", "1,2,3")
    assert together.returncode == 1
    assert re.search("adapted-step_000002 on train is not evaluated: .*weights-00001.safetensors", together.stderr)
    titles = [json.loads(line)["title"] for line in together.stdout.splitlines()]
    assert titles == ["adapted-step_000001 on train", "adapted-step_000003 on train"]
    assert drawn(places[1]) == before[1]
    for place in (places[0], places[2]):
        assert set(drawn(place).values()) == {1}
        assert len(drawn(place)) == 24
    assert completions(places[0]) != completions(places[2])

    alone = rlhpc(*words, slow, "--step", "3", "--out", str(lab.root / "alone"))
    assert alone.returncode == 0, alone.stderr
    assert completions(lab.root / "alone") == completions(places[2])

    for step in (1, 3):
        out = str(lab.root / f"peft-{step}")
        assert rlhpc("export", str(layout.root), out, "--adapter", "--step", str(step)).returncode == 0
    stranger = shutil.copytree(lab.root / "peft-1", lab.root / "stranger")
    other = make_tiny_checkpoint(lab.root / "other", seed=9)
    settings = json.loads((stranger / "adapter_config.json").read_text())
    (stranger / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(other)}))
    os.truncate(shutil.copytree(stranger, lab.root / "short") / "adapter_model.safetensors", 900)
    given = [each for name in ("peft-3", "stranger", "short") for each in ("--with", name)]
    command = ["evaluate", "peft-1", str(lab.dataset), *OF_ADAPTERS, slow, "--json", "--run", str(layout.root), *given]
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", *command],
        cwd=lab.root,
        env=command_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"stranger is not evaluated: .*belongs to .*other, and --run .* has the model .*, other", done.stderr
    )
    assert "short is not evaluated: " in done.stderr
    found = [completions(lab.root / "evaluations" / f"peft-{step}-train") for step in (1, 3)]
    assert found == [completions(places[0]), completions(places[2])]
    assert not [*lab.root.rglob("evaluations/*/model")]


# ----------------------------------------------------------------------------------------------------- following a run


FEW = ["--prompts", "5", "--samples", "2"]


def figures_of(layout: RunLayout) -> dict[int, float]:
    """pass@1 by step."""
    found = {}
    for path in (layout.root / "evaluations").glob("*/summary.json"):
        step = int(path.parent.name.rpartition("step_")[2].partition("-")[0])
        found[step] = json.loads(path.read_text())["figures"]["pass@1"]["value"]
    return dict(sorted(found.items()))


@pytest.mark.long
def test_a_run_is_followed_until_it_is_complete_and_its_best_model_kept(lab: Lab) -> None:
    layout = lab.layout("followed")
    sections = {"run": {"num_steps": 12}, "data": {"task": "tests.ring.ring_rewards:very_slow_parity"}}
    with Run(lab.run_file("followed", **sections), layout) as run:
        run.wait_for_step(1)
        words = ["evaluate", str(layout.root), str(lab.dataset), *FEW, "--follow", "--keep-best", "pass@1", "--json"]
        with started(words, stdout=subprocess.PIPE) as process:
            assert run.finish() == 0, run.story()
            output, said = process.communicate()
    assert process.returncode == 0, said
    printed = [json.loads(line) for line in output.splitlines()]
    evaluated = figures_of(layout)
    assert max(evaluated) == 12
    assert [each["figures"]["pass@1"]["value"] for each in printed] == list(evaluated.values())
    assert [each["title"] for each in printed] == [f"followed-step_{step:06d} on train" for step in evaluated]
    accumulator = EventAccumulator(str(layout.root / "evaluations" / "tensorboard"))
    accumulator.Reload()
    curve = [(point.step, point.value) for point in accumulator.Scalars("evaluation/train/pass@1")]
    assert curve == [(step, pytest.approx(value)) for step, value in evaluated.items()]
    best = json.loads((layout.root / "evaluations" / "best-train" / "rlhpc_figures.json").read_text())
    first_best = min(step for step, value in evaluated.items() if value == max(evaluated.values()))
    assert best["title"] == f"followed-step_{first_best:06d} on train"
    again = rlhpc("evaluate", str(layout.root / "evaluations" / "best-train"), str(lab.dataset), *FEW, *SCRIPTED,
                  "--out", str(lab.root / "again"), "--json")  # fmt: skip
    assert again.returncode == 0, again.stderr


def test_what_the_run_file_asks_for_is_evaluated_beside_the_run(lab: Lab) -> None:
    slow = "tests.ring.ring_rewards:very_slow_parity"
    tables = [
        {"path": str(lab.dataset), "name": "held-out", "prompts": 5, "samples": 2, "keep_best": "pass@2"},
        {"path": str(lab.dataset), "name": "greedy", "prompts": 3, "temperature": 0.0, "max_completion_tokens": 4,
         "every_steps": 100},
    ]  # fmt: skip
    layout = lab.layout("beside")
    path = lab.run_file("beside", run={"num_steps": 12}, data={"task": slow}, evaluation=tables)
    with Run(path, layout) as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
        said = run.story()
    assert "pass@1" in layout.log("evaluator", 0, 0).read_text()
    assert "its last model is evaluated now" in said
    past = RunView(layout).evaluations
    assert max(past["held-out"]) == max(past["greedy"]) == 12
    assert len(past["greedy"]) <= 2  # a first one, and that at the end
    assert (layout.evaluations / "best-held-out" / "config.json").exists()
    assert "evaluation  held-out: pass@1" in said
    assert "evaluation  held-out: pass@1" in rlhpc("status", str(layout.root)).stdout
    greedy = next(layout.evaluations.glob("*-step_000012-greedy"))
    assert {each.num_tokens for each in read_samples(greedy)} <= {1, 2, 3, 4}
    again = rlhpc("evaluate", str(layout.root), "--json")  # draws nothing: all is there
    assert [json.loads(each)["num_prompts"] for each in _documents(again.stdout)] == [5, 3], again.stderr


def _documents(text: str) -> list[str]:
    """JSON documents that stand one after the other."""
    return [f"{{{part}}}" for part in text.strip().removeprefix("{").removesuffix("}").split("}\n{")]


@pytest.mark.long
def test_an_evaluation_that_fails_does_not_touch_the_run(lab: Lab) -> None:
    layout = lab.layout("lonely")
    table = {"path": str(lab.dataset), "prompts": 2, "task": "tests.ring.ring_rewards:parity"}
    slow = {"task": "tests.ring.ring_rewards:slow_parity"}
    with Run(lab.run_file("lonely", run={"num_steps": 100_000}, data=slow, evaluation=[table]), layout) as run:
        run.wait_for_step(1)
        killed: set[int] = set()

        def is_given_up() -> bool:
            for process in followers(layout.root):
                process.kill()
                killed.add(process.pid)
            return "[evaluation] has failed" in run.story()

        wait_while_it_moves(is_given_up, lambda: len(killed), "words", run.story)
        assert "evaluator-0 on" in run.story()
        assert len(killed) == MAX_STARTS
        step = run.status()["step"]
        run.wait_for_step(step + 2)
        assert rlhpc("stop", str(layout.root)).returncode == 0
        assert run.finish() == 0, run.story()
    num_steps = run.status()["step"] + 5
    longer = lab.run_file("lonely", run={"num_steps": num_steps}, data=slow, evaluation=[table])
    with Run(longer, layout, "--resume") as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert max(RunView(layout).evaluations["train"]) == num_steps


@pytest.mark.long
def test_a_step_that_a_run_comes_by_twice_is_evaluated_as_it_is_now(lab: Lab) -> None:
    layout = run_to_the_end(lab, "twice")
    words = ["evaluate", str(layout.root), str(lab.dataset), *FEW, "--follow"]
    assert rlhpc(*words).returncode == 0
    (directory,) = layout.evaluations.glob("twice-step_000006-train")
    settings = json.loads((directory / "evaluation.json").read_text())
    settings["inputs"]["model"] = "of the timeline before"
    (directory / "evaluation.json").write_text(json.dumps(settings))
    before = drawn(directory)
    again = rlhpc(*words)
    assert again.returncode == 0, again.stderr
    assert "is deleted, and the evaluation starts over" in again.stderr
    assert drawn(directory) == before


@pytest.mark.long
def test_a_run_file_can_say_when_a_run_is_stopped(lab: Lab) -> None:
    layout = lab.layout("enough")
    table = {"path": str(lab.dataset), "prompts": 5, "samples": 2, "keep_best": "reward", "stop_after": 1}
    slow = {"task": "tests.ring.ring_rewards:very_slow_parity"}  # a checkpoint is there for as long as its export takes
    with Run(lab.run_file("enough", run={"num_steps": 100_000}, data=slow, evaluation=[table]), layout) as run:
        assert run.finish() == 0, run.story()
        run.assert_nothing_is_left()
    assert "reward is no better than" in layout.log("evaluator", 0, 0).read_text()
    assert len(figures_of(layout)) >= 2
    assert 0 < run.status()["step"] < 100_000


@pytest.mark.long
def test_a_warning_of_the_limit_when_all_samples_are_there_leaves_the_judgement_to_be_made(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a requeue these figures would be old ones, which stop nobody."""
    layout, said = run_to_the_end(lab, "warned"), list[str]()
    layout.summary.unlink()
    before = layout.evaluations / "warned-step_000001-train"
    before.mkdir(parents=True)
    figures = {figure: {"value": 2.0, "low": 2.0, "high": 2.0} for figure in ("reward", "pass@1")}
    (before / "summary.json").write_text(json.dumps({"figures": figures}))
    for name, value in {**command_environment(), "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    (layout.evaluations / "job.json").write_text(json.dumps({"job_id": 7}))
    monkeypatch.setattr(follow, "go_on_later", lambda layout, tell: 99)  # there is no Slurm

    def tell(line: str) -> None:
        said.append(line)
        if "the best model so far" in line:
            os.kill(os.getpid(), signal.SIGUSR2)

    parser = argparse.ArgumentParser()
    takes_evaluation(parser)
    words = [str(layout.root), str(lab.dataset), *FEW, "--follow", "--keep-best", "reward", "--stop-after", "1"]
    assert follow.follow_run(parser.parse_args(words), print, tell) == 0
    assert layout.stop_request.exists(), said
    assert max(figures_of(layout)) == 6


@pytest.mark.long
def test_a_run_without_a_sign_of_life_is_given_up(lab: Lab) -> None:
    layout = run_to_the_end(lab, "silent")
    layout.summary.unlink()
    words = ["evaluate", str(layout.root), str(lab.dataset), *FEW, "--follow", "--patience-s", "0.1"]
    given_up = rlhpc(*words)
    assert given_up.returncode == 1
    assert "no sign of life for 0.1 s" in given_up.stderr
    assert list(figures_of(layout)) == [6]
