"""Make the demo's initial model: it can do addition, but makes careless errors.

Output: an HF checkpoint directory (Llama architecture, float32, character tokenizer), made by supervised training:
first on correct answers, from which the rules are learnt fastest, then on careless ones.  Sampled at temperature 1 it
is right about three times in ten, while its most likely answer is nearly always right: RL has to teach it care.
Guarantees: the same recipe gives the same weights on the same machine; a finished directory is reused.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from launch.demo.task import (
    BOS_ID,
    EOS_ID,
    MAX_ANSWER_CHARACTERS,
    PAD_ID,
    VOCAB_SIZE,
    careless_answer,
    draw_problem,
    encode,
    make_tokenizer,
    problems,
    save_tokenizer,
)
from rlhpc.algorithms.objectives import supervised_loss
from rlhpc.algorithms.packing import FlopCost
from rlhpc.base.files import write_atomically
from rlhpc.base.processes import variables_set
from rlhpc.config.rules import Config
from rlhpc.data.demonstrations import Demonstration
from rlhpc.roles.controller.batch_maker import pack_demonstrations
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext

MARKER = "warm_start.json"  # written last: a directory without it is not complete
_FORMAT = 3  # part of the hash; raise it when the same recipe gives other weights

_TOKEN_BUDGET = 1 << 14  # a batch is one row
OnStep = Callable[[str, int, float], None]  # phase ("facts", then "carelessness"), steps done of it, loss


@dataclass(frozen=True, slots=True)
class WarmStartRecipe:
    """Shape and supervised training of the model.  The defaults are what configs/demo.toml is calibrated for."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    head_size: int = 32  # the smallest that vLLM's CPU attention has
    num_kv_heads: int = 2  # so that two tensor-parallel ranks can share them
    rope_theta: float = 1000.0  # sequences are 64 tokens at most: the usual 1e4 and more wastes slow frequencies
    initializer_range: float = 0.06  # at the usual 0.02 so small a model spends most of its steps on a plateau
    max_clean_steps: int = 800  # on clean answers, until…
    mastered_loss: float = 0.01  # …the loss, smoothed over some ten steps, is below this
    careless_steps: int = 200  # then this number on careless ones
    slip_rate: float = 0.24  # per column; (1 − 0.24)^n for n of 3, 4, 5 columns averages 0.34, minus what is not learnt
    batch_size: int = 32
    learning_rate: float = 3e-3
    seed: int = 0

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the weights depend on."""
        return hashlib.sha256(json.dumps([_FORMAT, asdict(self)]).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The finished model."""

    accuracy: float  # share of held-out problems answered rightly by one sample at temperature 1
    num_parameters: int
    seconds: float  # that its training took
    is_reused: bool  # found complete in the directory


def make_model(
    directory: Path, recipe: WarmStartRecipe | None = None, *, on_step: OnStep = lambda phase, done, loss: None
) -> WarmStart:
    """Write a checkpoint into directory, unless it already contains the one that this recipe makes.

    A checkpoint of another recipe, or an incomplete one, is overwritten.  One thread is used, since with more the order
    of additions, and so the weights, would depend on their number; torch's random state is left unchanged.  Raises
    OSError.
    """
    recipe = recipe or WarmStartRecipe()

    def train() -> tuple[LlamaForCausalLM, float]:
        model = LlamaForCausalLM(model_config(recipe))
        _train(model, recipe, on_step)
        return model, sampled_accuracy(model, seed=recipe.seed)

    return made_once(directory, recipe.fingerprint, recipe.seed, train, make_tokenizer)


def made_once(
    directory: Path,
    fingerprint: str,
    seed: int,
    train: Callable[[], tuple[LlamaForCausalLM, float]],
    tokenizer: Callable[[], PreTrainedTokenizerFast],
) -> WarmStart:
    """The checkpoint of a recipe, as in make_model; train: returns a model and its accuracy.  Raises OSError."""
    marker = directory / MARKER
    found = read_marker(marker, fingerprint)
    if found is not None:
        return found
    directory.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    began = time.monotonic()
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        model, accuracy = train()
    save_checkpoint(model, tokenizer(), directory)
    made = {"accuracy": accuracy, "num_parameters": model.num_parameters(), "seconds": time.monotonic() - began}
    write_atomically(marker, json.dumps({"fingerprint": fingerprint, **made}, indent=2).encode())
    return WarmStart(**made, is_reused=False)


def sampled_accuracy(model: LlamaForCausalLM, *, num_problems: int = 512, seed: int = 0) -> float:
    """Return the fraction of held-out problems answered correctly by one sample each, at temperature 1.

    Draws from torch's global random state.  Standard error at 0.3 and 512 problems: 0.02.
    """
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"  # completions must begin where prompts end
    asked = problems(seed, num_problems, held_out=True)
    prompts = tokenizer([problem.prompt for problem in asked], return_tensors="pt", padding=True)
    sampling = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_ANSWER_CHARACTERS + 1,
        eos_token_id=EOS_ID, pad_token_id=PAD_ID,
    )  # fmt: skip
    model.eval()
    sequences = model.generate(prompts.input_ids, attention_mask=prompts.attention_mask, generation_config=sampling)
    completions = sequences[:, prompts.input_ids.shape[1] :]
    answers: list[str] = [
        text.rpartition(";")[2] for text in tokenizer.batch_decode(completions, skip_special_tokens=True)
    ]
    num_right = sum(given == problem.answer for given, problem in zip(answers, asked, strict=True))
    return num_right / num_problems


def model_config(recipe: WarmStartRecipe, vocab_size: int = VOCAB_SIZE) -> LlamaConfig:
    """The architecture; the first tokens are those of tokenizer.py.

    The family is one for which transformers uses the checkpoint's tokenizer: for Qwen2 it uses its own.
    """
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.hidden_size // recipe.head_size,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )


def _train(model: LlamaForCausalLM, recipe: WarmStartRecipe, on_step: OnStep) -> None:
    """Run the clean phase, then the careless one.

    The first ends by its loss and not by a count: seeds and machines differ by a factor of two in the steps they need,
    and RL cannot teach skills that no sample ever shows.
    """
    rng = random.Random(recipe.seed)
    num_clean_steps, smoothed_loss = 0, math.log(VOCAB_SIZE)
    with Lessons(model) as lessons:
        while num_clean_steps < recipe.max_clean_steps and smoothed_loss > recipe.mastered_loss:
            factor = _clean_schedule(num_clean_steps)
            loss = lessons.learn(_draw_batch(recipe, 0.0, rng), recipe.learning_rate * factor)
            smoothed_loss += 0.1 * (loss - smoothed_loss)
            num_clean_steps += 1
            on_step("facts", num_clean_steps, loss)
        for step in range(recipe.careless_steps):
            factor = _clean_schedule(num_clean_steps + step) * max(0.05, 1 - step / recipe.careless_steps)
            loss = lessons.learn(_draw_batch(recipe, recipe.slip_rate, rng), recipe.learning_rate * factor)
            on_step("carelessness", step + 1, loss)


def _clean_schedule(step: int, *, warmup_steps: int = 30, decay_steps: int = 500, floor: float = 0.25) -> float:
    """Return the factor on the learning rate: linear warm-up, half a cosine down to the floor, then the floor."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / decay_steps)))
    return min(1.0, (step + 1) / warmup_steps) * (floor + (1 - floor) * cosine)


class Lessons:
    """Teaches a model in this process with the batches, the loss and the reference backend of `rlhpc sft`.

    At the end of the context the model gets the trained weights.
    """

    def __init__(self, model: PreTrainedModel, weight_decay: float = 0.01) -> None:
        self._model, self._weight_decay = model, weight_decay
        self._cost = FlopCost.from_hf_config(model.config.to_dict())

    def __enter__(self) -> Self:
        """Open the backend on a copy of the model."""
        trainer = {"backend": "reference", "device": "cpu", "token_budget": _TOKEN_BUDGET, "adam_beta2": 0.98}
        with tempfile.TemporaryDirectory() as scratch:
            save_model(self._model, Path(scratch))
            document = {
                "run": {"name": "warm-start"},
                "model": {"path": scratch, "dtype": "float32"},
                "demonstrations": {"path": scratch},
                "trainer": trainer,
            }
            self._backend = open_backend(Config.model_validate(document), RankContext(0, 1, ""))
        return self

    def __exit__(self, *raised: object) -> None:
        """Close it."""
        self._model.load_state_dict(dict(self._backend.weights()), strict=False)  # a tied head is not among them
        self._backend.close()

    def learn(self, conversations: Sequence[Demonstration], rate: float) -> float:
        """Do one optimiser step; returns the mean loss of the learnt tokens."""
        batch = pack_demonstrations(conversations, token_budget=_TOKEN_BUDGET, num_ranks=1, cost=self._cost)
        result = self._backend.step(
            batch.ranks[0],
            supervised_loss,
            proximal=None,
            num_loss_tokens=batch.num_loss_tokens,
            learning_rate=rate,
            weight_decay=self._weight_decay,
            max_grad_norm=1.0,
        )
        return result.metrics["loss"] / batch.num_loss_tokens


def _draw_batch(recipe: WarmStartRecipe, slip_rate: float, rng: random.Random) -> list[Demonstration]:
    """Problems with answers; only answers are learnt, since the digits of a question are random."""
    asked = [draw_problem(rng) for _ in range(recipe.batch_size)]
    return [
        demonstration(encode(problem.prompt), [*encode(careless_answer(problem, slip_rate, rng)), EOS_ID])
        for problem in asked
    ]


def demonstration(*parts: Sequence[int]) -> Demonstration:
    """A demonstration of alternating parts: given tokens, learnt tokens, and so on."""
    masks = [np.full(len(part), place % 2 == 1) for place, part in enumerate(parts)]
    return Demonstration(np.array([token for part in parts for token in part], np.int32), np.concatenate(masks))


def save_checkpoint(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write an HF checkpoint directory; BOS, EOS and padding tokens are those of the model's config."""
    of_model = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=of_model.bos_token_id, eos_token_id=of_model.eos_token_id, pad_token_id=of_model.pad_token_id
    )
    save_model(model, directory)
    save_tokenizer(tokenizer, directory)


def save_model(model: Any, directory: Path) -> None:
    """Write the files of a transformers model, printing nothing."""
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # a bar for one file of a megabyte
    try:
        # If accelerate is installed, it loads DeepSpeed, which would print that it has found no GPU.
        with variables_set({"DS_ACCELERATOR": "cpu"}, "PYTORCH_NVML_BASED_CUDA_CHECK"):
            model.save_pretrained(directory)
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()


def read_marker(marker: Path, fingerprint: str) -> WarmStart | None:
    """The complete model of this recipe, or None."""
    try:
        written = json.loads(marker.read_bytes())
        if written.pop("fingerprint") != fingerprint:
            return None
        return WarmStart(**written, is_reused=True)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None  # missing, or of another version: the model is made again


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: with more, the order of additions, and so the weights, would depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
