"""Beside TRL's SFTTrainer on the demo's model, packed, turn about: tokens a second of supervised fine-tuning.

    python -m bench.sft [--rounds 3] [--steps 80] [--threads 1] [--row 256]
        [--strategy bfd|wrapped] [--cache DIR]
    python -m bench.sft --dpo [--steps 20]

With --dpo instead: `rlhpc sft` learns preferences for so many steps, and TRL's DPOTrainer computes from the model that
it leaves what rlhpc has said of held-out pairs: loss, accuracy, margin.

The answers of a careless pupil to the demo's problems, as prompt and completion, loss on completions; about as many
tokens in a batch on both sides, in float32, by AdamW.  TRL packs rows of --row tokens: "bfd", conversations whole and
apart, as here, a row at a time, since all rows of a batch would have one mask; or "wrapped", cut and seeing each other.
Ours is what the controller and a rank of a run do with a step, in one process: rows from demonstrations, forward,
backward, optimiser.  Figures are of the time from the first step to the last.  TRL's environment is that of
bench.versus_trl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.demo_runs import make_demo_model
from bench.figures import tell
from bench.versus_trl import environment_of_trl
from launch.demo.task import careless_answer, problems
from rlhpc.algorithms.objectives import supervised_loss
from rlhpc.algorithms.packing import FlopCost
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.rules import Config, supervised
from rlhpc.data.demonstrations import open_demonstrations
from rlhpc.metrics.curves import read_curves
from rlhpc.roles.controller.batch_maker import SupervisedBatches
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext

NUM_RECORDS, SLIP_RATE, LEARNING_RATE = 4_000, 0.24, 1e-4
BATCH_TOKENS = 4096
NUM_PAIRS, NUM_HELD_OUT, PAIRS_A_STEP, BETA = 1_000, 200, 40, 0.1
MEAN_TOKENS = 49  # of a conversation: what batch_size is made of


def write_records(file: Path) -> None:
    """Prompts, and answers of which some are wrong."""
    rng = random.Random(0)
    asked = problems(0, NUM_RECORDS)
    lines = (json.dumps({"prompt": p.prompt, "completion": careless_answer(p, SLIP_RATE, rng)}) for p in asked)
    file.write_text("".join(f"{line}\n" for line in lines))


def train(settings: dict[str, str]) -> None:
    """Our side, in a process of its own; prints what trl_side.py prints."""
    torch.set_num_threads(int(settings["threads"]))
    document = {
        "run": {"name": "sft"},
        "model": {"path": settings["model"], "dtype": "float32"},
        "demonstrations": {"path": settings["data"], "completion_field": "completion"},
        "sft": {"batch_size": BATCH_TOKENS // MEAN_TOKENS, "num_steps": int(settings["steps"]), "max_tokens": 128},
        "trainer": {"backend": "reference", "device": "cpu", "token_budget": 2 * BATCH_TOKENS},
    }
    demonstrations = open_demonstrations(config := Config.model_validate(document))
    config = supervised(config, demonstrations.num_conversations)
    cost = FlopCost.from_hf_config(json.loads((config.model.path / "config.json").read_bytes()))
    batches, backend = SupervisedBatches(demonstrations, config, cost), open_backend(config, RankContext(0, 1, ""))
    began_s, tokens = time.monotonic(), 0
    for step in range(config.run.num_steps):
        batch = batches.rows(step)
        backend.step(
            batch.ranks[0],
            supervised_loss,
            proximal=None,
            num_loss_tokens=batch.num_loss_tokens,
            learning_rate=LEARNING_RATE,
            weight_decay=0.0,
            max_grad_norm=1.0,
        )
        tokens += sum(len(row.token_ids) for row in batch.rows)
        used = resource.getrusage(resource.RUSAGE_SELF)
        line = {"at_s": time.monotonic() - began_s, "cpu_s": used.ru_utime + used.ru_stime, "tokens": tokens}
        sys.stdout.write(json.dumps({"step": step + 1, **line}) + "\n")


def preferences(options: argparse.Namespace, python: Path, scratch: Path) -> None:
    """Print what rlhpc and TRL say of the same pairs under the same two models."""
    rng, asked = random.Random(0), problems(0, NUM_PAIRS + NUM_HELD_OUT)
    pairs = [
        {"prompt": p.prompt, "chosen": right, "rejected": wrong}
        for p in asked
        if (right := careless_answer(p, 0.0, rng)) != (wrong := careless_answer(p, SLIP_RATE, rng))
    ]
    for name, part in (("learnt", pairs[:-NUM_HELD_OUT]), ("held_out", pairs[-NUM_HELD_OUT:])):
        (scratch / f"{name}.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in part))
    model, run = make_demo_model(options.cache), scratch / "run"
    table = 'completion_field = "chosen"\nrejected_field = "rejected"\n'
    (scratch / "run.toml").write_text(
        f'run = {{name = "dpo", directory = "{run}"}}\nmodel = {{path = "{model}", dtype = "float32"}}\n'
        f'[[demonstrations]]\npath = "{scratch}/learnt.jsonl"\n{table}'
        f'[[demonstrations]]\npath = "{scratch}/held_out.jsonl"\nheld_out = true\n{table}'
        f'[sft]\nloss = "dpo"\nbeta = {BETA}\nbatch_size = {PAIRS_A_STEP}\nnum_steps = {options.steps}\n'
        f"max_tokens = 128\nevaluate_every = {options.steps}\nlearning_rate = {LEARNING_RATE}\n"
        '[trainer]\nbackend = "reference"\ntoken_budget = 4096\ndevice = "cpu"\n'
    )
    subprocess.run([sys.executable, "-m", "launch.cli", "sft", str(scratch / "run.toml")], check=True)
    curves = read_curves(RunLayout(run).tensorboard)
    names = ("loss", "preference_accuracy", "preference_margin")
    ours = [curves[f"sft/held_out_{name}"].last for name in names]
    (scratch / "settings.json").write_text(
        json.dumps(
            {"trainer": "dpo", "model": str(run / "model"), "reference": str(model), "beta": BETA, "batch": 50,
             "data": str(scratch / "held_out.jsonl"), "scratch": str(scratch / "trl"), "threads": options.threads}
        )
    )  # fmt: skip
    command = [str(python), str(Path(__file__).with_name("trl_side.py")), str(scratch / "settings.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (theirs,) = (json.loads(line)["dpo"] for line in done.stdout.splitlines() if line.startswith('{"dpo"'))
    for name, mine, other in zip(names, ours, theirs, strict=True):
        print(f"{name:<22} rlhpc {mine:.8f}   TRL {other:.8f}   difference {abs(mine - other):.1e}")
    tell("DPO loss, difference from TRL's", abs(ours[0] - theirs[0]))


def measured(command: list[str], settings: Path, threads: int) -> tuple[float, float]:
    """Tokens a second, and CPU seconds for a million tokens."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, str(settings)], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    first, last = lines[0], lines[-1]
    tokens = last["tokens"] - first["tokens"]
    return tokens / (last["at_s"] - first["at_s"]), 1e6 * (last["cpu_s"] - first["cpu_s"]) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--threads", type=int, default=1, help="of either process")
    parser.add_argument("--row", type=int, default=256, help="tokens of TRL's packed rows")
    parser.add_argument("--strategy", choices=("bfd", "wrapped"), default="bfd", help="of TRL's packing")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "rlhpc-bench")
    parser.add_argument("--side", type=Path, help="settings of our side; what a round starts")
    parser.add_argument("--dpo", action="store_true", help="compare what is said of preferences, and no speed")
    options = parser.parse_args()
    if options.side is not None:
        train(json.loads(options.side.read_text()))
        return
    options.cache.mkdir(parents=True, exist_ok=True)
    python = environment_of_trl(options.cache / "trl")
    if python is None:
        return
    if options.dpo:
        with tempfile.TemporaryDirectory() as scratch:
            preferences(options, python, Path(scratch))
        return
    with tempfile.TemporaryDirectory() as scratch:
        data, settings = Path(scratch) / "demonstrations.jsonl", Path(scratch) / "settings.json"
        write_records(data)
        document = {
            "trainer": "sft", "model": str(make_demo_model(options.cache)), "data": str(data), "steps": options.steps,
            "threads": options.threads, "row": options.row, "rows": BATCH_TOKENS // options.row,
            "strategy": options.strategy,
            "learning_rate": LEARNING_RATE, "scratch": str(Path(scratch) / "trl"),
        }  # fmt: skip
        settings.write_text(json.dumps(document))
        trl_side = Path(__file__).with_name("trl_side.py")
        sides = {"TRL": [str(python), str(trl_side)], "rlhpc": [sys.executable, "-m", "bench.sft", "--side"]}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, command in sides.items():
                rate, cost = measured(command, settings, options.threads)
                found[name].append((rate, cost))
                print(
                    f"load {os.getloadavg()[0]:4.1f}  {name:<7}{rate:8.0f} tokens/s {cost:8.1f} CPU-s / million",
                    flush=True,
                )
    rates, costs = (
        {name: sum(each[part] for each in found[name]) / options.rounds for name in found} for part in (0, 1)
    )
    tell("SFT tokens/s over TRL", rates["rlhpc"] / rates["TRL"])
    tell("SFT CPU over TRL", costs["rlhpc"] / costs["TRL"])
    print(f"rlhpc / TRL: tokens/s {rates['rlhpc'] / rates['TRL']:.2f}, CPU a token {costs['rlhpc'] / costs['TRL']:.2f}")


if __name__ == "__main__":
    main()
