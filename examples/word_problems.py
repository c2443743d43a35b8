"""Make what docs/tutorial.md trains on: word problems like GSM8K's, and a tiny model that is careless at them.

`python examples/word_problems.py tutorial` writes tutorial/train.parquet, laid out as verl's scripts lay out GSM8K, and
tutorial/model, an ordinary HF checkpoint of 0.3 million parameters with a tokenizer of words and a chat template.
Everything is drawn from fixed seeds; nothing is downloaded.  It takes one to three minutes.  With a model and a dataset
of your own you need none of this.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Farid")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stamps")
TEMPLATE = "Question: {question}\nAnswer:"  # what the chat template makes of a question
CHAT_TEMPLATE = (
    "{% for message in messages %}Question: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
PAD_ID, EOS_ID = 0, 1
WORDS = r"####|\d+|[A-Za-z]+|[\s\S]"
NUM_PROBLEMS = 2_000
SLIP_RATE = 0.3  # of a line of working: its result is off by one
NO_MARK_RATE = 0.15  # of an answer: the line with #### is left out
CLEAN_STEPS, CARELESS_STEPS, BATCH_SIZE, LEARNING_RATE = 700, 150, 32, 3e-3


def draw_problem(rng: random.Random) -> tuple[str, int, int, int]:
    """Return a question and its three numbers; the answer is first + more − fewer, never negative."""
    first, more = rng.randint(2, 9), rng.randint(2, 9)
    fewer = rng.randint(2, min(9, first + more))
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    question = f"{name} has {first} {thing}. {name} buys {more} more and loses {fewer}. How many are left?"
    return question, first, more, fewer


def write_answer(first: int, more: int, fewer: int, rng: random.Random, *, slips: float, no_mark: float) -> str:
    """Return the working, a line a step, and the answer behind ####, as GSM8K writes it; careless if asked to be."""
    between = _slip(first + more, rng, slips)
    left = _slip(between - fewer, rng, slips)
    lines = [f"{first} + {more} = {between}", f"{between} - {fewer} = {left}", f"#### {left}"]
    return "\n".join(lines[:2] if rng.random() < no_mark else lines)


def draw_records(num_problems: int, seed: int) -> list[dict[str, Any]]:
    """Return problems as verl has them: a chat, what the reward function compares with, and remarks."""
    rng, records = random.Random(seed), []
    for index in range(num_problems):
        question, *numbers = draw_problem(rng)
        answer = write_answer(*numbers, rng, slips=0.0, no_mark=0.0)
        records.append(
            {
                "data_source": "word_problems",
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer.rpartition("#### ")[2]},
                "extra_info": {"split": "train", "index": index, "answer": answer},
            }
        )
    return records


def write_dataset(path: Path, num_problems: int, seed: int) -> None:
    """Write them as Parquet."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(draw_records(num_problems, seed)), path)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a word, number or mark, whose decode() gives back the very text."""
    words = {"Question", "Answer", "has", "buys", "more", "and", "loses", "How", "many", "are", "left", "####"}
    words |= {*NAMES, *THINGS, *map(str, range(25)), *" .,?:+-=\n"}
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *sorted(words)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )


def make_model(
    directory: Path, *, clean_steps: int = CLEAN_STEPS, careless_steps: int = CARELESS_STEPS, seed: int = 0
) -> None:
    """Teach a tiny Llama the task, then some carelessness, and write it as an HF checkpoint."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the order of additions, and so the weights, would depend on the number
    tokenizer, rng = make_tokenizer(), random.Random(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
            initializer_range=0.06, eos_token_id=EOS_ID, pad_token_id=PAD_ID, bos_token_id=None, dtype="float32",
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(clean_steps + careless_steps):
        is_careless = step >= clean_steps
        rates = {"slips": SLIP_RATE, "no_mark": NO_MARK_RATE} if is_careless else {"slips": 0.0, "no_mark": 0.0}
        progress = (step - clean_steps) / careless_steps if is_careless else step / clean_steps
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 30) * (1.0 - 0.9 * progress)
        loss = _loss(model, tokenizer, rng, rates)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            sys.stderr.write(f"step {step + 1}, loss {loss.item():.3f}\n")
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    logging.disable_progress_bar()  # a bar for one file of a megabyte
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random, rates: dict[str, float]
) -> torch.Tensor:
    """Mean cross-entropy of a fresh batch, over the tokens of the answers."""
    rows, labels = [], []
    for _ in range(BATCH_SIZE):
        question, *numbers = draw_problem(rng)
        prompt = tokenizer.encode(TEMPLATE.format(question=question))
        answer = [*tokenizer.encode(" " + write_answer(*numbers, rng, **rates)), EOS_ID]
        rows.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([-100] * len(prompt) + answer))
    token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)
    targets = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    logits = model(token_ids).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())


def _slip(result: int, rng: random.Random, rate: float) -> int:
    return max(0, result + rng.choice((-1, 1))) if rng.random() < rate else result


def main(directory: Path) -> None:
    """Write dataset and model below `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_dataset(directory / "train.parquet", NUM_PROBLEMS, seed=1)
    make_model(directory / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a dataset of word problems and a tiny model.")
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="where to write them, such as tutorial")
    main(parser.parse_args().directory)
