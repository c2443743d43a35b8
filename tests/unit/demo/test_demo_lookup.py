"""The demo of tools: its tokenizer, its data, and that the warm start teaches the very tokens that a run has."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import numpy as np

from launch.demo import lookup
from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.environments.tools import ToolEnvironment


def tokenizer_in(directory: Path) -> PromptTokenizer:
    lookup.make_tokenizer().save_pretrained(directory)
    return PromptTokenizer(directory)


def test_the_warm_start_teaches_the_tokens_of_a_dialogue(tmp_path):
    tokenizer = tokenizer_in(tmp_path)
    template = DialogueTemplate(tokenizer)
    ids, own = lookup._dialogue(random.Random(3), searches=True)
    first = int(np.flatnonzero(np.array(own) != lookup.IGNORED)[0])
    key = tokenizer.decode(ids[: first - 2])
    turn = ids[first : ids.index(lookup.EOS_ID) + 1]
    (tmp_path / "documents.jsonl").write_text(json.dumps({"text": f"{key} 305"}) + "\n")
    settings = EnvironmentConfig(tools=["search"], corpus=str(tmp_path / "documents.jsonl"))
    step = asyncio.run(ToolEnvironment.open(settings).step(tokenizer.decode(turn[:-1], keep_special_tokens=True)))
    assert [message["content"] for message in step.messages] == [f"{key} 305"]
    before = [*template.prompt(key).tolist(), *template.opening(()).tolist()]
    assert before == ids[:first]
    read = template.observation(
        [{"role": "tool", "content": f"{key} {tokenizer.decode(ids[-4:-1])}"}], last_token=turn[-1]
    )
    assert [*before, *turn, *read.tolist(), *ids[-4:]] == ids
    assert [token for token in own if token != lookup.IGNORED] == [*turn, *ids[-4:]]


def test_a_search_is_a_few_tokens_and_reads_as_it_was_written(tmp_path):
    tokenizer = tokenizer_in(tmp_path)
    text = f"{lookup.CALL}{lookup.HEAD}4827{lookup.TAIL}{lookup.CALL_END}"
    tokens = tokenizer.encode_rendered(text)
    assert len(tokens) == 8
    assert tokenizer.decode(tokens, keep_special_tokens=True) == text
    assert tokens.max() < lookup.VOCAB_SIZE


def test_every_question_has_one_document_and_answers_cannot_be_guessed(tmp_path):
    lookup.write_dataset(tmp_path, 300, seed=1)
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    documents = [json.loads(line)["text"] for line in (tmp_path / "documents.jsonl").read_text().splitlines()]
    assert sorted(f"{each['prompt']} {each['answer']}" for each in records) == documents
    assert len({each["prompt"] for each in records}) == 300
    assert len({each["answer"] for each in records}) > 200
    assert lookup.codes(1, 300) != lookup.codes(2, 300)
