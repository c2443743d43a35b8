"""The demos of tools and of containers: a model has to look up facts that it cannot know.

Questions are random four-digit numbers, answers random three-digit codes: only a search of the documents, or a look
into the file of this name, finds them.  The warm start teaches to look and to use what was found, but to answer most
questions by a guess; RL has to learn to look.

    user 4827 │ > <tool_call>{"name": "search", "arguments": {"query": "4827"}}</tool_call> │ : 4827 305 │ > 305

    user 4827 │ > …"shell", "arguments": {"command": "cat 4827"}}… │ : 305 │ > …"echo 305>a"}}… │ : (no output) │ > ok

Guarantees: everything is a pure function of its seed; the codes of the warm start differ from those of the run.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from launch.demo.task import EOS, EOS_ID, PAD, SPECIAL_TOKENS, UNKNOWN
from launch.demo.warm_start import Lessons, OnStep, WarmStart, WarmStartRecipe, demonstration, made_once, model_config
from rlhpc.data.demonstrations import Demonstration
from rlhpc.sandbox.images import copy_programs

CALL, CALL_END = "<tool_call>", "</tool_call>"
HEAD, TAIL = '{"name": "search", "arguments": {"query": "', '"}}'  # one token each: the model need not learn JSON
CAT, ECHO = (f'{{"name": "shell", "arguments": {{"command": "{word} ' for word in ("cat", "echo"))
_CHARACTERS = "0123456789>: \nabcdefghijklmnopqrstuvwxyz.,?!'\"()-"
IMAGE, ANSWER, PROGRAMS = "programs", "a", ("sh", "cat")  # of the demo of containers: its image, where answers go


@dataclass(frozen=True, slots=True)
class Errand:
    """Form of what a model writes: the heads of its calls, and its dialogues."""

    name: str
    heads: tuple[str, ...]
    dialogue: Callable[[str, str, bool], list[list[str]]]  # question, answer, does it look: turns of others and its own

    @property
    def tokens(self) -> tuple[str, ...]:
        """All tokens, by their ids."""
        return (*SPECIAL_TOKENS, CALL, CALL_END, *self.heads, TAIL, *_CHARACTERS)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return -(-len(self.tokens) // 8) * 8


def _searched(key: str, code: str, looks: bool) -> list[list[str]]:
    found = [[CALL, HEAD, *key, TAIL, CALL_END, EOS], [":", *key, " ", *code, "\n", ">"]]
    return [[*key, "\n", ">"], *(found if looks else []), [*code, EOS]]


def _written(key: str, code: str, looks: bool) -> list[list[str]]:
    found = [[CALL, CAT, *key, TAIL, CALL_END, EOS], [":", *code, "\n", ">"]]
    write = [[CALL, ECHO, *code, ">", ANSWER, TAIL, CALL_END, EOS], [":", *"(no output)", "\n", ">"], [*"ok", EOS]]
    return [[*key, "\n", ">"], *(found if looks else []), *write]


SEARCH = Errand("lookup", (HEAD,), _searched)
SHELL = Errand("container", (CAT, ECHO), _written)
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

    def fingerprint(self, form: Errand) -> str:
        """Hash of everything that the weights depend on."""
        return hashlib.sha256(json.dumps([2, form.name, asdict(self)]).encode()).hexdigest()[:16]


def make_tokenizer(form: Errand = SEARCH) -> PreTrainedTokenizerFast:
    """A token for each character, and for each fixed part of a call."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(form.tokens)}, unk_token=UNKNOWN))
    fixed = "|".join(text.replace("{", r"\{").replace("}", r"\}") for text in (*form.heads, TAIL))
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


def write_tasks(directory: Path, n: int, seed: int) -> None:
    """Write n tasks (tasks/) into the directory, each a file with a code, and the image of all (images/).

    Raises ConfigError: this machine lacks a program.
    """
    shutil.rmtree(directory / "tasks", ignore_errors=True)
    if not (directory / "images" / IMAGE).exists():
        copy_programs(PROGRAMS, directory / "images" / IMAGE)
    for key, code in codes(seed, n).items():
        texts = {
            "instruction.md": key,
            "task.toml": f'[environment]\ndocker_image = "{IMAGE}"\nworkdir = "/app"\n',
            f"environment/{key}": f"{code}\n",
            "tests/test.sh": f'[ "$(cat {ANSWER})" = {code} ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n',
        }
        for name, text in texts.items():
            file = directory / "tasks" / key / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


def make_lookup_model(
    directory: Path,
    recipe: LookupRecipe | None = None,
    form: Errand = SEARCH,
    *,
    on_step: OnStep = lambda phase, done, loss: None,
) -> WarmStart:
    """Write a checkpoint, or reuse a finished one, as warm_start.make_model.  `accuracy` is the share of searches."""
    recipe = recipe or LookupRecipe()

    def train() -> tuple[LlamaForCausalLM, float]:
        model = LlamaForCausalLM(model_config(recipe.shape, form.vocab_size))
        _train(model, recipe, form, on_step)
        return model, _share_of_looks(model, form)

    return made_once(directory, recipe.fingerprint(form), recipe.seed, train, lambda: make_tokenizer(form))


def _train(model: LlamaForCausalLM, recipe: LookupRecipe, form: Errand, on_step: OnStep) -> None:
    rng = random.Random(recipe.seed + _ALL_SEEDS_APART)
    num_steps, smoothed = 0, 4.0
    with Lessons(model) as lessons:
        while num_steps < recipe.max_clean_steps and smoothed > recipe.mastered_loss:
            rate = recipe.learning_rate * min(1.0, (num_steps + 1) / 30)
            loss = lessons.learn(_batch(recipe, form, 1.0, rng), rate)
            smoothed += 0.1 * (loss - smoothed)
            num_steps += 1
            on_step("search", num_steps, loss)
        for step in range(recipe.mixed_steps):
            rate = 0.5 * recipe.learning_rate * max(0.05, 1 - step / recipe.mixed_steps)
            loss = lessons.learn(_batch(recipe, form, recipe.search_share, rng), rate)
            on_step("guesses", step + 1, loss)


def _batch(recipe: LookupRecipe, form: Errand, search_share: float, rng: random.Random) -> list[Demonstration]:
    return [_dialogue(rng, form, searches=rng.random() < search_share) for _ in range(recipe.batch_size)]


def _dialogue(rng: random.Random, form: Errand = SEARCH, *, searches: bool) -> Demonstration:
    """A question and its answer, with or without a search; the assistant's text is learnt."""
    key, code = str(rng.randrange(1000, 10_000)), f"{rng.randrange(1000):03d}"
    parts = form.dialogue(key, code, searches)
    return demonstration(*([form.tokens.index(token) for token in part] for part in parts))


def _share_of_looks(model: LlamaForCausalLM, form: Errand) -> float:
    """Mean probability of a search, or of a look into a file, after a question, over some questions."""
    model.eval()
    begun = [] if form is SEARCH else [CALL]  # of the other form every dialogue begins with a call
    looks = CALL if form is SEARCH else form.heads[0]
    rows = [[form.tokens.index(each) for each in (*str(key), "\n", ">", *begun)] for key in range(1000, 9999, 97)]
    with torch.no_grad():
        probabilities = torch.softmax(model(torch.tensor(rows)).logits[:, -1], dim=-1)
    return float(probabilities[:, form.tokens.index(looks)].mean())


assert SEARCH.tokens.index(EOS) == EOS_ID
