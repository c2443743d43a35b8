"""Beside TRL's GRPOTrainer on one task, turn about: samples a second, CPU seconds for 1,000, seconds to reward 0.8.

    python -m bench.versus_trl [--task demo|lognormal] [--rounds 2] [--steps 120] [--threads 1] [--cache DIR]

TRL gets an environment of its own below DIR (~/.cache/rlhpc-bench), with the versions below; where pip cannot reach
them one line says so.  demo: configs/demo.toml, the model and problems of the demo, the same batches and learning rate.
lognormal: a model that stops after 48 tokens in the median and after 8 times that at most, as lognormal lengths with
a deviation of 1; the reward is a coin, so that lengths stay as they are.  Figures are of the time from the first step
to the last: what a process does before and after is the same at any length of a run, and left out on both sides.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

from bench.demo_cost import run_watched, span
from bench.demo_runs import GOAL, SMOOTHED_OVER, Rewards, make_demo_model
from bench.figures import tell
from launch.demo.task import EOS_ID, encode, make_tokenizer, running_mean, write_dataset
from launch.demo.warm_start import Lessons, WarmStartRecipe, demonstration, model_config, one_thread, save_checkpoint
from rlhpc.base.run_directory import RunLayout
from rlhpc.data.demonstrations import Demonstration

REQUIREMENTS = ("torch==2.13.0", "trl==1.16.0", "transformers==5.19.0", "datasets", "accelerate", "jinja2")
GROUPS, GROUP_SIZE = 12, 8
LEARNING_RATE, WARMUP_STEPS = 2e-4, 10
MEDIAN_TOKENS, LONGEST_TOKENS, SIGMA = 48, 384, 1.0
LENGTH_STEPS, LENGTH_BATCH = 400, 32


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, from its first step to its last."""

    samples: int
    seconds: float
    cpu_s: float
    to_goal_s: float  # nan: it did not get there

    def __str__(self) -> str:
        per_thousand, rate = 1000 * self.cpu_s / self.samples, self.samples / self.seconds
        return f"{rate:8.1f} samples/s {per_thousand:8.2f} CPU-s / 1,000 {self.to_goal_s:8.0f} s to {GOAL}"


@dataclass(frozen=True, slots=True)
class Task:
    """What both train."""

    model: Path
    data: Path
    reward: str
    max_prompt_tokens: int
    max_completion_tokens: int
    learning_rate: float
    words: tuple[str, ...]  # what configs/demo.toml is changed in


# ------------------------------------------------------------------------------------------------------------ tasks


def demo_task(root: Path) -> Task:
    """As configs/demo.toml has it."""
    model, data = make_demo_model(root), root / "train.jsonl"
    write_dataset(data, 8_000, seed=0)
    return Task(model, data, "integer_arithmetic", 12, 52, LEARNING_RATE, ())


def lognormal_task(root: Path) -> Task:
    """Lengths with a tail; the learning rate is next to nothing, so that they stay."""
    model, data = root / "lengths", root / "lengths.jsonl"
    if not (model / "model.safetensors").exists():
        save_checkpoint(lengths_model(), make_tokenizer(), model)
    lines = (json.dumps({"prompt": f"{number:04d}=", "answer": "0"}) for number in range(4_000))
    data.write_text("".join(f"{line}\n" for line in lines))
    words = (
        f"generation.max_completion_tokens={LONGEST_TOKENS}",
        "generation.max_prompt_tokens=8",
        "data.task=bench.trl_side:is_even",
        "trainer.token_budget=16384",
        "trainer.learning_rate=1e-7",
        "generation.kv_cache_bytes=536870912",
    )
    return Task(model, data, "bench.trl_side:is_even", 8, LONGEST_TOKENS, 1e-7, words)


def lengths_model() -> Qwen2ForCausalLM:
    """A model that writes digits and stops as lognormal lengths do: taught by examples of such lengths."""
    rng, recipe = random.Random(0), WarmStartRecipe()
    config = model_config(recipe)
    config.max_position_embeddings = 2 * LONGEST_TOKENS
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        with Lessons(model, weight_decay=0.0) as lessons:
            for step in range(LENGTH_STEPS):
                rate = 2e-3 * min(1.0, (step + 1) / 30) * (1 - step / LENGTH_STEPS)
                lessons.learn(draw_lengths(rng), rate)
    return model


def draw_lengths(rng: random.Random) -> list[Demonstration]:
    """A batch of texts of digits; what is longer than the longest does not stop."""
    drawn: list[Demonstration] = []
    for _ in range(LENGTH_BATCH):
        length = max(1, round(rng.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)))
        digits = "".join(rng.choices("0123456789", k=min(length, LONGEST_TOKENS)))
        end = [EOS_ID] if length <= LONGEST_TOKENS else []
        drawn.append(demonstration(encode(f"{rng.randrange(4_000):04d}="), [*encode(digits), *end]))
    return drawn


# ------------------------------------------------------------------------------------------------------------- runs


def ours(task: Task, steps: int, seed: int, scratch: Path) -> Figures:
    """rlhpc, all its processes."""
    layout = RunLayout(scratch / "run")
    looks = run_watched(layout, task.model, task.data, [f"run.num_steps={steps}", f"run.seed={seed}", *task.words])
    first, last = span(looks)
    samples = GROUP_SIZE * (last.num_groups - first.num_groups)
    curve = Rewards.of(layout).curve
    version = next((number for number, value in enumerate(curve) if value >= GOAL), math.inf)
    to_goal = next((look.at_s - first.at_s for look in looks if look.num_steps > version), math.nan)
    return Figures(samples, last.at_s - first.at_s, sum(last.cpu_s.values()) - sum(first.cpu_s.values()), to_goal)


def trls(task: Task, steps: int, seed: int, scratch: Path, python: Path, threads: int) -> Figures:
    """TRL, one process."""
    settings = {
        "model": str(task.model), "data": str(task.data), "task": task.reward, "groups": GROUPS,
        "group_size": GROUP_SIZE, "steps": steps, "seed": seed, "max_completion_tokens": task.max_completion_tokens,
        "learning_rate": task.learning_rate, "warmup_steps": WARMUP_STEPS, "scratch": str(scratch / "trl"),
        "threads": threads,
    }  # fmt: skip
    path = scratch / "settings.json"
    path.write_text(json.dumps(settings))
    command = [str(python), str(Path(__file__).with_name("trl_side.py")), str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    first, last = lines[0], lines[-1]
    curve = running_mean([line["reward"] for line in lines], SMOOTHED_OVER)
    to_goal = next(
        (line["at_s"] - first["at_s"] for line, value in zip(lines, curve, strict=True) if value >= GOAL), math.nan
    )
    samples = GROUPS * GROUP_SIZE * (len(lines) - 1)
    return Figures(samples, last["at_s"] - first["at_s"], last["cpu_s"] - first["cpu_s"], to_goal)


def environment_of_trl(directory: Path) -> Path | None:
    """Its Python; made if it is not there.  None: pip cannot reach what it needs."""
    python = directory / "bin" / "python"
    marker = directory / "complete.json"
    wanted = json.dumps(REQUIREMENTS)
    if marker.exists() and marker.read_text() == wanted:
        return python
    venv.create(directory, with_pip=True, clear=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        print(f"skipped: pip cannot install {', '.join(REQUIREMENTS)}: {' '.join(last)}")
        return None
    marker.write_text(wanted)
    return python


def show(name: str, found: Sequence[Figures]) -> None:
    for figures in found:
        print(f"{name:<7}{figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("demo", "lognormal"), default="demo")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--threads", type=int, default=1, help="of TRL's process")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "rlhpc-bench")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    python = environment_of_trl(options.cache / "trl")
    if python is None:
        return
    task = (demo_task if options.task == "demo" else lognormal_task)(options.cache)
    sides: dict[str, list[Figures]] = {"TRL": [], "rlhpc": []}
    for seed in range(options.rounds):
        for name, found in sides.items():
            with tempfile.TemporaryDirectory() as scratch:
                if name == "TRL":
                    found.append(trls(task, options.steps, seed, Path(scratch), python, options.threads))
                else:
                    found.append(ours(task, options.steps, seed, Path(scratch)))
            print(f"load {os.getloadavg()[0]:4.1f}  ", end="")
            show(name, found[-1:])
    of_trl, of_ours = sides["TRL"], sides["rlhpc"]
    rate = [sum(each.samples for each in side) / sum(each.seconds for each in side) for side in (of_ours, of_trl)]
    cost = [sum(each.cpu_s for each in side) / sum(each.samples for each in side) for side in (of_ours, of_trl)]
    tell(f"samples/s over TRL, {options.task}", rate[0] / rate[1])
    tell(f"CPU over TRL, {options.task}", cost[0] / cost[1])
    print(f"rlhpc / TRL: samples/s {rate[0] / rate[1]:.2f}, CPU a sample {cost[0] / cost[1]:.2f}")


if __name__ == "__main__":
    main()
