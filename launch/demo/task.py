"""The demo's task: addition worked out column by column, and a careless solver for the warm start.

Prompts look like ``4827+9356=``, answers like ``7+6+0=13;2+5+1=08;8+3+0=11;4+9+1=14;14183``: one field per column,
right to left, as digit + digit + carry = two-digit sum; then the total.  The last ``;``-separated field is the answer.
Guarantees: everything is a pure function of its seed; training and held-out problems are disjoint.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# ------------------------------------------------------------------------------------------------------- learning curve
#
# Draw the learning curve of a demo run.
#
# Input: rewards by version.  Output: a PNG file.

_SMOOTHED_OVER = 9  # versions on either side of the running mean together


def draw_learning_curve(path: Path, versions: Sequence[int], rewards: Sequence[float]) -> None:
    """Draw mean reward over policy version, with a running mean, into a PNG.  Raises OSError."""
    from matplotlib.figure import Figure  # half a second to import, and needed once

    figure = Figure(figsize=(7.0, 4.0), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(versions, rewards, ".", color="#9bb8d3", markersize=5, label="each version")
    axes.plot(versions, running_mean(rewards, _SMOOTHED_OVER), color="#1f4e79", linewidth=2, label="running mean")
    axes.set(xlabel="policy version (optimiser steps applied)", ylabel="mean reward", ylim=(0, 1.02))
    axes.set_title("Every rollout counts for the version that admitted it", fontsize=10, loc="left")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean over a centred window of `width` values, shorter at both ends."""
    array, half = np.asarray(values, float), width // 2
    return [float(array[max(0, i - half) : i + half + 1].mean()) for i in range(len(array))]


# ------------------------------------------------------------------------------------------------------------ tokenizer
#
# A character-level tokenizer, generated locally.
#
# Output: tokenizer.json and tokenizer_config.json as in any HF checkpoint, so that the demo's model needs no network
# and runs through the same code as a real one.

PAD, BOS, EOS, UNKNOWN = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*/=();\n "
PAD_ID, BOS_ID, EOS_ID, UNKNOWN_ID = range(len(SPECIAL_TOKENS))

_TOKENS = (*SPECIAL_TOKENS, *CHARACTERS)
_IDS = {token: i for i, token in enumerate(_TOKENS)}
VOCAB_SIZE = len(_TOKENS)  # 24: a multiple of 8, best for matrix kernels, without rows that are no token


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer; it adds no tokens to a text, and decodes to exactly the text that was encoded."""
    tokenizer = Tokenizer(models.WordLevel(_IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # not ".": that leaves out newlines
    tokenizer.decoder = decoders.Fuse()  # without it decode() puts a space between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the tokenizer's files, with a class name that transformers 4 also knows."""
    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    named = json.loads(file.read_bytes()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(named, indent=2), encoding="utf-8")


def encode(text: str) -> list[int]:
    """Encode a text of CHARACTERS as the tokenizer does, but faster.  Raises KeyError for other characters."""
    return [_IDS[character] for character in text]


# ----------------------------------------------------------------------------------------------------------------- task

MIN_DIGITS = 3
MAX_DIGITS = 5
MAX_PROMPT_CHARACTERS = 2 * MAX_DIGITS + 2  # both numbers, plus, equals
MAX_ANSWER_CHARACTERS = 9 * MAX_DIGITS + MAX_DIGITS + 1  # "7+6+0=13;" for each column, then the total

_HELD_OUT_ONE_IN = 16
_LARGEST_COLUMN_SUM = 9 + 9 + 1
_CARRY_SLIP_SHARE = 0.6  # a lost carry is one habit to unlearn; slips by one concern about 200 facts


@dataclass(frozen=True, slots=True)
class Problem:
    """Two numbers with equally many digits, without leading zeros, whose sum has one digit more.

    Always one digit more, because digits of totals with and without a leading carry are at different positions, which
    costs so small a model three times the steps, or defeats it.
    """

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The question as the model reads it."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The total: the only part that the reward checks."""
        return str(self.left + self.right)

    @property
    def is_held_out(self) -> bool:
        """True for problems that are kept for evaluation: about one in 16, the same on every machine."""
        return zlib.crc32(self.prompt.encode()) % _HELD_OUT_ONE_IN == 0

    @property
    def columns(self) -> Iterator[tuple[int, int]]:
        """The digits to be added, right to left."""
        return zip(map(int, reversed(str(self.left))), map(int, reversed(str(self.right))), strict=True)


def problems(seed: int, n: int, *, held_out: bool = False) -> list[Problem]:
    """Return n different problems, drawn as draw_problem does."""
    rng = random.Random(seed)
    found: dict[Problem, None] = {}
    while len(found) < n:
        found[draw_problem(rng, held_out=held_out)] = None
    return list(found)


def draw_problem(rng: random.Random, *, held_out: bool = False) -> Problem:
    """Return a training problem, or a held-out one; all lengths from MIN_DIGITS to MAX_DIGITS are equally likely."""
    while True:
        num_digits = rng.randint(MIN_DIGITS, MAX_DIGITS)
        lowest, highest = 10 ** (num_digits - 1), 10**num_digits - 1
        problem = Problem(rng.randint(lowest, highest), rng.randint(lowest, highest))
        if problem.left + problem.right > highest and problem.is_held_out == held_out:
            return problem


def careless_answer(problem: Problem, slip_rate: float, rng: random.Random) -> str:
    """Return the answer of a pupil who gets each column's sum wrong with probability slip_rate.

    A slip is off by one or, with a carry lost or invented, by ten.  Later columns are consistent with it, so that one
    slip spoils the total (unless a later one happens to undo a wrong carry) although all other tokens are correct.
    """
    carry, fields, total = 0, [], ""
    for left, right in problem.columns:
        column_sum = left + right + carry
        written = _slip(column_sum, rng) if rng.random() < slip_rate else column_sum
        fields.append(f"{left}+{right}+{carry}={written:02d}")
        carry, unit = divmod(written, 10)
        total = f"{unit}{total}"
    return ";".join([*fields, f"1{total}" if carry else total])


def write_dataset(path: Path, n: int, seed: int, *, held_out: bool = False) -> None:
    """Write n problems as JSON lines {"prompt": "4827+9356=", "answer": "14183"}; makes the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = ({"prompt": p.prompt, "answer": p.answer} for p in problems(seed, n, held_out=held_out))
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def _slip(column_sum: int, rng: random.Random) -> int:
    if rng.random() < _CARRY_SLIP_SHARE:
        return (column_sum + 10) % 20
    wrong = (column_sum - 1, column_sum + 1)
    return rng.choice([value for value in wrong if 0 <= value <= _LARGEST_COLUMN_SUM])
