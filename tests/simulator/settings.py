"""The settings of a simulated run: small, quick, and another combination for each seed; and how an attempt begins."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from launch.run_directory.prepare import AttemptStart, ResumePoint, choose, note_attempt, num_attempts, put_aside
from rlhpc.base.ownership import Fence
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import config_hash
from rlhpc.config.rules import Config
from rlhpc.roles.lifecycle import RoleContext

EOS = 2
VOCABULARY = 14
NUM_PROMPTS = 200


def settings_of(seed: int, root: Path) -> Config:
    """One to three groups of two or three a step, a few steps."""
    rng = random.Random(f"{seed} settings")
    base = _base(inputs_beside(root))
    groups_per_step, max_staleness = rng.choice((1, 2, 2, 3)), rng.choice((0, 1, 1, 2))
    admission = base.admission.model_copy(
        update={
            "groups_per_step": groups_per_step,
            "group_size": rng.choice((2, 2, 3)),
            "max_staleness": max_staleness,
            "window_groups": rng.choice((None, None, 1, 2)) if max_staleness else None,
            "lease_deadline_s": rng.choice((6.0, 20.0)),
        }
    )
    if seed % 3 == 0:
        admission = admission.model_copy(update={"step_parts": groups_per_step})
    return base.model_copy(
        update={
            "run": base.run.model_copy(update={"directory": root, "num_steps": rng.choice((2, 3, 4)), "seed": seed}),
            "admission": admission,
            **_curriculum(rng, seed, base),
            "checkpoint": base.checkpoint.model_copy(update={"every_steps": rng.choice((1, 2, 2, 3))}),
            "buffer": base.buffer.model_copy(update={"segment_groups": rng.choice((3, 8, 8))}),
        }
    )


def begin(layout: RunLayout, config: Config) -> RoleContext:
    """Begin an attempt as the launcher does; returns who its controller is."""
    index = num_attempts(layout)
    owner = Fence.take(layout, index).owner
    choice = choose(layout, ResumePoint(), lambda _: None)
    put_aside(choice, lambda _: None)
    note_attempt(layout, AttemptStart(index, choice.step, owner))
    return RoleContext(
        role="controller", replica=0, num_ranks=1, attempt=index, resume_step=choice.step,
        incarnation=f"0.{index}.0-c", layout=layout, config=config, config_hash=config_hash(config),
        meet_timeout_s=60.0, owner=owner,
    )  # fmt: skip


def _curriculum(rng: random.Random, seed: int, base: Config) -> dict[str, object]:
    """For a third of the runs stages: which prompt is next depends on what was sampled before.

    For a quarter, more rollouts of hard prompts.
    """
    rules: dict[str, object] = {}
    if rng.random() <= 1 / 3:
        rules = {"stages": rng.choice(((1.0,), (0.0, 1.0))), "stage_pass_rate": 0.2, "stage_groups": rng.choice((1, 3))}
    if seed % 4 == 1:
        rules |= {"max_group_size": 5, "pass_chance": 0.9}
    return {"curriculum": base.curriculum.model_copy(update=rules)}


@functools.cache
def _base(model: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "simulated", "num_steps": 4},
            "model": {"path": model, "dtype": "float32"},
            "data": {"path": model / "train.jsonl", "task": "integer_arithmetic"},
            "generation": {"engine": "scripted", "max_prompt_tokens": 4, "max_completion_tokens": 6},
            "admission": {"groups_per_step": 2, "group_size": 2},
            "trainer": {"backend": "reference", "token_budget": 64},
            "weights": {"timeout_s": 8.0},
            "buffer": {"partial_interval_tokens": 2, "partial_interval_s": 1.5},
            "transport": {"dead_after_s": 10.0},
        }
    )


def inputs_beside(root: Path) -> Path:
    """A tokenizer of digits, the figures of a model, and prompts that are told apart by their tokens; made once."""
    directory = root.parent / "inputs"
    if directory.exists():
        return directory
    directory.mkdir(parents=True)
    tokens = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    model = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8,
             "vocab_size": VOCABULARY, "eos_token_id": EOS}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(model))
    records = [{"prompt": f"{n:03d}", "answer": "1", "difficulty": n % 3} for n in range(NUM_PROMPTS)]
    lines = [json.dumps(record) for record in records]
    (directory / "train.jsonl").write_text("\n".join(lines) + "\n")
    return directory
