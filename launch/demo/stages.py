"""The demo of stages: supervised fine-tuning, RL with a reward model and a judge, evaluation, from one run file.

What a user would have is made here: a base model that adds without a mistake but was never asked to be a careless
pupil; demonstrations of one; a reward model that prefers right answers, by pairs of a right and a careless one
(Bradley–Terry); and a judge that grades an answer from 0 to 9 by its share of right columns.

Guarantees: everything is a pure function of its seed; finished models are reused.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from launch.demo.task import EOS_ID, PAD_ID, Problem, careless_answer, draw_problem, encode, make_tokenizer, problems
from launch.demo.warm_start import (
    Lessons,
    OnStep,
    WarmStart,
    WarmStartRecipe,
    demonstration,
    made_once,
    make_model,
    model_config,
)

# The judge reads a problem and its answer, as configs/demo_stages.toml puts them, and writes its grade on a new line.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{{ '\\n' }}"
BEST = 9
_COLUMN = re.compile(r"(\d)\+(\d)\+(\d)=(\d\d)")
_SEEDS_APART = 2_000_003  # between those of the models and those of the run's problems


@dataclass(frozen=True, slots=True)
class StagesRecipe:
    """Training of the models.  The defaults are what configs/demo_stages.toml is calibrated for."""

    base: WarmStartRecipe = field(default_factory=lambda: WarmStartRecipe(careless_steps=0))
    slip_rate: float = 0.24  # of the pupil
    damaged_share: float = 0.1  # of the answers that the judge learns to grade
    num_steps: int = 120  # of the reward model, and of the judge
    batch_size: int = 24  # pairs, or answers
    learning_rate: float = 5e-4
    seed: int = 0

    def fingerprint(self, what: str) -> str:
        """Hash of everything that the weights of a model depend on."""
        return hashlib.sha256(json.dumps([3, what, self.base.fingerprint, asdict(self)]).encode()).hexdigest()[:16]


def make_base(directory: Path, recipe: StagesRecipe, on_step: OnStep) -> WarmStart:
    """Write the base model, or reuse it."""
    return make_model(directory, recipe.base, on_step=on_step)


def write_demonstrations(path: Path, n: int, recipe: StagesRecipe) -> None:
    """Write n careless answers as JSON lines {"prompt": …, "completion": …}; makes the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(recipe.seed + _SEEDS_APART)
    asked = problems(recipe.seed + _SEEDS_APART, n)
    records = [{"prompt": each.prompt, "completion": careless_answer(each, recipe.slip_rate, rng)} for each in asked]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def make_reward_model(directory: Path, base: Path, recipe: StagesRecipe, on_step: OnStep) -> WarmStart:
    """Write a classifier with one class; `accuracy` is the share of held-out pairs that it orders rightly."""

    def train() -> tuple[LlamaForSequenceClassification, float]:
        config = model_config(recipe.base)
        config.num_labels = 1
        model = LlamaForSequenceClassification(config)
        model.load_state_dict(_weights_of(base), strict=False)  # all but the new head
        rng = random.Random(recipe.seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
        for step in range(recipe.num_steps):
            right, careless = _scores(model, _pairs(recipe.batch_size, recipe, rng))
            loss = -torch.nn.functional.logsigmoid(right - careless).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            on_step("reward model", step + 1, float(loss.detach()))
        model.eval()
        with torch.no_grad():
            right, careless = _scores(model, _pairs(256, recipe, rng, held_out=True))
        return model, float((right > careless).float().mean())

    return made_once(directory, recipe.fingerprint("reward model"), recipe.seed, train, make_tokenizer)


def make_judge(directory: Path, base: Path, recipe: StagesRecipe, on_step: OnStep) -> WarmStart:
    """Write a chat model whose reply is a grade; `accuracy` is the share of held-out answers that it grades rightly."""

    def train() -> tuple[LlamaForCausalLM, float]:
        model = LlamaForCausalLM(model_config(recipe.base))
        model.load_state_dict(_weights_of(base), strict=False)  # its head is tied
        rng = random.Random(recipe.seed)
        with Lessons(model) as lessons:
            for step in range(recipe.num_steps):
                answers = [_graded(recipe, rng) for _ in range(recipe.batch_size)]
                taught = [demonstration(encode(text), [*encode(str(grade)), EOS_ID]) for text, grade in answers]
                on_step("judge", step + 1, lessons.learn(taught, recipe.learning_rate))
        model.eval()
        asked = [_graded(recipe, rng, held_out=True) for _ in range(256)]
        with torch.no_grad():
            num_right = sum(
                int(model(torch.tensor([encode(text)])).logits[0, -1].argmax()) == encode(str(grade))[0]
                for text, grade in asked
            )
        return model, num_right / len(asked)

    return made_once(directory, recipe.fingerprint(f"judge {CHAT_TEMPLATE}"), recipe.seed, train, judge_tokenizer)


def _weights_of(base: Path) -> dict[str, torch.Tensor]:
    """Read the weights of the base model, printing nothing."""
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        return dict(LlamaForCausalLM.from_pretrained(base, local_files_only=True).state_dict())
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()


def judge_tokenizer() -> PreTrainedTokenizerFast:
    """Return the demo's tokenizer, with a template that ends with a new line."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _pairs(n: int, recipe: StagesRecipe, rng: random.Random, *, held_out: bool = False) -> list[tuple[str, str]]:
    """Draw pairs of a right answer and a careless one that is wrong, with their prompt."""
    found: list[tuple[str, str]] = []
    while len(found) < n:
        problem = draw_problem(rng, held_out=held_out)
        right, careless = (careless_answer(problem, rate, rng) for rate in (0.0, recipe.slip_rate))
        if careless != right:
            found.append((problem.prompt + right, problem.prompt + careless))
    return found


def _scores(
    model: LlamaForSequenceClassification, pairs: Sequence[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of the right answers and of the careless ones, [pairs] each."""
    texts = [encode(text) for pair in zip(*pairs, strict=True) for text in pair]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [PAD_ID] * (longest - len(text)) for text in texts])
    scores = model(ids, attention_mask=(ids != PAD_ID).long()).logits[:, 0]
    return scores[: len(pairs)], scores[len(pairs) :]


def _graded(recipe: StagesRecipe, rng: random.Random, *, held_out: bool = False) -> tuple[str, int]:
    """Draw an answer with its prompt, as the judge reads it, and its grade."""
    problem = draw_problem(rng, held_out=held_out)
    answer = careless_answer(problem, rng.choice((0.0, recipe.slip_rate, 2 * recipe.slip_rate)), rng)
    if rng.random() < recipe.damaged_share:  # a policy writes such answers, too
        place = rng.randrange(len(answer))
        answer = answer[:place] + rng.choice(("", answer[place + 1 :], answer[place : place + 1] + answer[place:]))
    return f"{problem.prompt}{answer}\n", round(BEST * share_of_right_columns(problem, answer))


def share_of_right_columns(problem: Problem, answer: str) -> float:
    """Share of the columns of a worked answer whose sum is right, given the carry that it began with."""
    columns = [*problem.columns]
    num_right = sum(
        (match := _COLUMN.fullmatch(written)) is not None
        and (int(match[1]), int(match[2])) == column
        and int(match[1]) + int(match[2]) + int(match[3]) == int(match[4])
        for written, column in zip(answer.split(";"), columns, strict=False)
    )
    return num_right / len(columns)
