"""How completions of each dataset are drawn."""

from __future__ import annotations

from pathlib import Path

from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.roles.controller.state import sampling_of
from tests.unit.data.checkpoints import CHATML, make_tokenizer_files
from tests.unit.roles.small_ring import small_config


def test_a_completion_ends_with_a_turn_where_its_dataset_may_be_a_chat(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path, chat_template=CHATML))
    config = small_config(1)
    ways = ({}, {"use_chat_template": True}, {"prompt_field": "prompt"})
    datasets = tuple(config.data[0].model_copy(update=way) for way in ways)
    sampling = sampling_of(config.model_copy(update={"data": datasets}), tokenizer)
    assert [sampling(prompt_id).stop_token_ids for prompt_id in range(4)] == [(2,), (2, 5), (2, 5), (2,)]
