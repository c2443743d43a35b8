"""The demo of tools: a model has to look up facts that it cannot know.

Questions are random four-digit numbers, answers random three-digit codes: only a search of the documents, one per
question, finds them.  The warm start teaches to write a search and read its result, but to answer most questions by a
guess; RL has to learn to search.

    user 4827 │ > <tool_call>{"name": "search", "arguments": {"query": "4827"}}</tool_call> │ : 4827 305 │ > 305

Guarantees: everything is a pure function of its seed; the codes of the warm start differ from those of the run.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from launch.demo.task import EOS, EOS_ID, PAD, SPECIAL_TOKENS, UNKNOWN
from launch.demo.warm_start import Lessons, OnStep, WarmStart, WarmStartRecipe, demonstration, made_once, model_config
from rlhpc.data.demonstrations import Demonstration

CALL, CALL_END = "<tool_call>", "</tool_call>"
HEAD, TAIL = '{"name": "search", "arguments": {"query": "', '"}}'  # one token each: the model need not learn JSON
_CHARACTERS = "0123456789>: \nabcdefghijklmnopqrstuvwxyz.,?!'\"()-"
_TOKENS = (*SPECIAL_TOKENS, CALL, CALL_END, HEAD, TAIL, *_CHARACTERS)
VOCAB_SIZE = -(-len(_TOKENS) // 8) * 8
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}>{{ message.content }}<eos>"
    "{% elif message.role == 'tool' %}:{{ message.content }}\n"
    "{% else %}{{ message.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
_ALL_SEEDS_APART = 1_000_003  # offset between seeds of the warm start's codes and those of a run


@dataclass(frozen=True, slots=True)
class LookupRecipe:
    """Shape and supervised training of the model.  The defaults are what configs/demo_tool.toml is calibrated for."""

    shape: WarmStartRecipe = field(default_factory=WarmStartRecipe)
    max_clean_steps: int = 1500  # on dialogues with a search, until…
    mastered_loss: float = 0.02  # …the loss, smoothed, is below this
    mixed_steps: int = 120  # then on guesses, too
    search_share: float = 0.2  # of the mixed dialogues
    batch_size: int = 48
    learning_rate: float = 2e-3
    seed: int = 0

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the weights depend on."""
        return hashlib.sha256(json.dumps([2, "lookup", asdict(self)]).encode()).hexdigest()[:16]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character, and for each fixed part of a search."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(_TOKENS)}, unk_token=UNKNOWN))
    fixed = "|".join(text.replace("{", r"\{").replace("}", r"\}") for text in (HEAD, TAIL))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{fixed}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN)
    made.add_tokens([CALL, CALL_END])
    made.chat_template = CHAT_TEMPLATE
    return made


def codes(seed: int, n: int) -> dict[str, str]:
    """n questions, and the answer of each."""
    rng = random.Random(seed)
    keys = rng.sample(range(1000, 10_000), n)
    return {str(key): f"{rng.randrange(1000):03d}" for key in keys}


def write_dataset(directory: Path, n: int, seed: int) -> None:
    """Write n questions (train.jsonl) and the documents that answer them (documents.jsonl) into the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    known = codes(seed, n)
    records = [{"prompt": key, "answer": code} for key, code in known.items()]
    documents = [{"text": f"{key} {code}"} for key, code in sorted(known.items())]
    for name, rows in (("train.jsonl", records), ("documents.jsonl", documents)):
        (directory / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def make_lookup_model(
    directory: Path, recipe: LookupRecipe | None = None, *, on_step: OnStep = lambda phase, done, loss: None
) -> WarmStart:
    """Write a checkpoint, or reuse a finished one, as warm_start.make_model.  `accuracy` is the share of searches."""
    recipe = recipe or LookupRecipe()

    def train() -> tuple[LlamaForCausalLM, float]:
        model = LlamaForCausalLM(model_config(recipe.shape, VOCAB_SIZE))
        _train(model, recipe, on_step)
        return model, _search_share(model)

    return made_once(directory, recipe.fingerprint, recipe.seed, train, make_tokenizer)


def _train(model: LlamaForCausalLM, recipe: LookupRecipe, on_step: OnStep) -> None:
    rng = random.Random(recipe.seed + _ALL_SEEDS_APART)
    num_steps, smoothed = 0, 4.0
    with Lessons(model) as lessons:
        while num_steps < recipe.max_clean_steps and smoothed > recipe.mastered_loss:
            rate = recipe.learning_rate * min(1.0, (num_steps + 1) / 30)
            loss = lessons.learn(_batch(recipe, 1.0, rng), rate)
            smoothed += 0.1 * (loss - smoothed)
            num_steps += 1
            on_step("search", num_steps, loss)
        for step in range(recipe.mixed_steps):
            rate = 0.5 * recipe.learning_rate * max(0.05, 1 - step / recipe.mixed_steps)
            loss = lessons.learn(_batch(recipe, recipe.search_share, rng), rate)
            on_step("guesses", step + 1, loss)


def _batch(recipe: LookupRecipe, search_share: float, rng: random.Random) -> list[Demonstration]:
    return [_dialogue(rng, searches=rng.random() < search_share) for _ in range(recipe.batch_size)]


def _dialogue(rng: random.Random, *, searches: bool) -> Demonstration:
    """A question and its answer, with or without a search; the assistant's text is learnt."""
    key, code = str(rng.randrange(1000, 10_000)), f"{rng.randrange(1000):03d}"
    parts: list[Sequence[str]] = [[*key, "\n", ">"]]
    if searches:
        parts += [[CALL, HEAD, *key, TAIL, CALL_END, EOS], [":", *key, " ", *code, "\n", ">"]]
    parts += [[*code, EOS]]
    return demonstration(*([_TOKENS.index(token) for token in part] for part in parts))


def _search_share(model: LlamaForCausalLM) -> float:
    """Mean probability of a search after a question, over some questions."""
    model.eval()
    asked = torch.tensor([[_TOKENS.index(token) for token in (*str(key), "\n", ">")] for key in range(1000, 9999, 97)])
    with torch.no_grad():
        probabilities = torch.softmax(model(asked).logits[:, -1], dim=-1)
    return float(probabilities[:, _TOKENS.index(CALL)].mean())


assert _TOKENS.index(EOS) == EOS_ID
