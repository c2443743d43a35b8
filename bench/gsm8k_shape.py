"""A run of GSM8K's shape end to end, and where its time goes.

    python -m bench.gsm8k_shape [--model qwen3-0.6b] [--steps 12] [--groups 32] [--group-size 8] [--tokens 256]
                                [--device cuda] [--engine vllm] [KEY=VALUE ...]

configs/gsm8k.toml with a random model of real sizes, made-up questions of GSM8K's length and a coin for a reward:
weights do not change what it costs.  Next to no rollout ends early: completions have --tokens tokens.  On one card
trainer and engine share it.  Prints what a step takes, who waits for whom, and tokens/s of both sides, means after the
first tenth of the steps; then what `rlhpc report` says.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.demo_runs import environment
from bench.figures import tell
from bench.ladder import settled_mean
from bench.trainer import MODELS, make_model
from launch.view.run import RunView
from rlhpc.base.run_directory import RunLayout
from tests.tiny_models import EOS_ID, make_character_tokenizer

RUN_FILE = Path(__file__).parents[1] / "configs" / "gsm8k.toml"
QUESTION_TOKENS = 96  # characters here; GSM8K's questions have 60 tokens in the mean, with a template about so many
MAX_PROMPT_TOKENS = 512  # of configs/gsm8k.toml
KV_CACHE_BYTES = 12 << 30
SHOWN = {
    "time/step_s": "s, a step",
    "trainer/step_s": "s, of which the trainer computes",
    "time/wait_for_batch_s": "s, the trainer waits for its batch",
    "time/wait_for_weights_s": "s, until all engines have the new version",
    "weights/publish_s": "s, export and broadcast",
    "weights/pause_s": "s, an engine cannot sample",
    "trainer/idle_ratio": "share of the time in which the trainer waits",
    "generator/idle_ratio": "share of the time in which engines have no request",
    "generator/tokens_per_s": "tokens/s sampled",
}


def write_questions(path: Path, count: int) -> Path:
    """Write records as GSM8K has them."""
    rng, words = random.Random(0), ("apples", "has", "buys", "gives", "three", "each", "costs", "how many", "left")
    lines = []
    for _ in range(count):
        question = " ".join(rng.choice(words) for _ in range(QUESTION_TOKENS))[:QUESTION_TOKENS]
        lines.append(json.dumps({"question": question, "answer": f"so many #### {rng.randint(1, 99)}"}))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def save_tokenizer(model: Path, vocabulary: int) -> None:
    """Give a model a tokenizer that knows a word for each of its tokens, since rewards see text, and an end of turn."""
    make_character_tokenizer().save_pretrained(model)
    tokenizer, config = model / "tokenizer.json", model / "config.json"
    document = json.loads(tokenizer.read_text(encoding="utf-8"))
    known = document["model"]["vocab"]
    known.update({f"w{index} ": index for index in range(len(known), vocabulary)})
    tokenizer.write_text(json.dumps(document), encoding="utf-8")
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"eos_token_id": EOS_ID}))


def words_of(options: argparse.Namespace, root: Path) -> list[str]:
    """What configs/gsm8k.toml is changed in."""
    model = make_model(root / "model", options.model)
    save_tokenizer(model, MODELS[options.model][-1])
    groups, size = options.groups, options.group_size
    longest = MAX_PROMPT_TOKENS + options.tokens
    return [
        f"run.directory={root / 'run'}", f"run.num_steps={options.steps}", f"model.path={model}",
        f"data.path={write_questions(root / 'train.jsonl', max(500, 4 * groups))}", "data.use_chat_template=false",
        "data.task=tests.ring.ring_rewards:parity", f"admission.groups_per_step={groups}",
        f"admission.group_size={size}", "admission.active_sampling=false", f"generation.engine={options.engine}",
        f"generation.max_completion_tokens={options.tokens}", f"generation.kv_cache_bytes={options.kv_cache_bytes}",
        f"trainer.device={options.device}", f"trainer.token_budget={max(longest, options.token_budget)}",
        f"model.dtype={'bfloat16' if options.device == 'cuda' else 'float32'}",
        "checkpoint.every_steps=1000", "trainer.warmup_steps=0",
        *options.words,
    ]  # fmt: skip


def run(words: Sequence[str]) -> None:
    """Run to the end.  Raises SystemExit with the last of its output if that fails."""
    command = [sys.executable, "-m", "launch.cli", "run", str(RUN_FILE), *words, "--fresh"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="further settings")
    parser.add_argument("--model", default="qwen3-0.6b", choices=MODELS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of one completion")
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--kv-cache-bytes", type=int, default=KV_CACHE_BYTES)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--engine", default="vllm", choices=["vllm", "scripted"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        run(words_of(options, root))
        curves = RunView(RunLayout(root / "run")).curves
        for name, what in SHOWN.items():
            if name in curves:
                value = settled_mean(curves, name)
                print(f"{value:12,.3f} {what} ({name})")
                tell(f"run {name}", value)
        tokens = curves["tokens/trained_total"].values
        tell("run tokens trained/s", rate := (tokens[-1] - tokens[0]) / float(curves["time/step_s"].values[1:].sum()))
        print(f"{rate:12,.0f} tokens/s trained, prompts and completions")
        print(subprocess.run([sys.executable, "-m", "launch.cli", "report", str(root / "run")], check=False,
                             capture_output=True, text=True, env=environment()).stdout)  # fmt: skip


if __name__ == "__main__":
    main()
