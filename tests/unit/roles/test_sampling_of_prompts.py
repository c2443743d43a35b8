"""How completions of a prompt are drawn."""

from __future__ import annotations

from pathlib import Path

from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.roles.controller.state import sampling_of
from tests.unit.data.checkpoints import CHATML, make_tokenizer_files
from tests.unit.roles.small_ring import small_config


def test_a_completion_ends_where_the_chat_template_ends_an_answer(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path, chat_template=CHATML))
    config = small_config(1)
    assert sampling_of(config, tokenizer)(0).stop_token_ids == (2, 5)
