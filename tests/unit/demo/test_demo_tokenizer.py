"""The character tokenizer, in memory and read back from its files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from launch.demo.task import (
    BOS_ID,
    CHARACTERS,
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
    encode,
    make_tokenizer,
    problems,
    worked_answer,
)

TOKENIZER = make_tokenizer()


@given(st.text(alphabet=CHARACTERS, max_size=80))
def test_texts_come_back_as_they_went_in_one_token_a_character(text):
    token_ids = TOKENIZER.encode(text)
    assert len(token_ids) == len(text)
    assert TOKENIZER.decode(token_ids) == text


@given(st.text(alphabet=CHARACTERS, max_size=80))
def test_the_short_way_to_encode_agrees_with_the_tokenizer(text):
    assert encode(text) == TOKENIZER.encode(text)


def test_the_short_way_refuses_a_character_without_a_token():
    with pytest.raises(KeyError):
        encode("four")


def test_every_row_of_the_embedding_is_a_token():
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(VOCAB_SIZE))
    assert VOCAB_SIZE % 8 == 0


def test_the_saved_files_load_in_both_libraries_with_their_special_tokens(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    problem = problems(0, 1)[0]
    text = problem.prompt + worked_answer(problem)
    through_transformers = AutoTokenizer.from_pretrained(tmp_path)
    through_tokenizers = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert through_transformers.encode(text) == through_tokenizers.encode(text).ids == encode(text)
    assert through_transformers.eos_token_id == EOS_ID
    assert through_transformers.bos_token_id == BOS_ID
    assert through_transformers.pad_token_id == PAD_ID
    assert through_tokenizers.decode([*encode(text), EOS_ID], skip_special_tokens=True) == text
