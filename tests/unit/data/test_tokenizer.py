from __future__ import annotations

import json
from datetime import datetime

import numpy as np
import pytest
from checkpoints import CHATML, make_tokenizer_files

from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.errors import ConfigError


def test_text_survives_the_way_to_tokens_and_back(tmp_path):
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path))
    token_ids = tokenizer.encode("What is 12 + 30?")
    assert token_ids.dtype == np.int32
    assert len(token_ids) == 16  # neither cut nor padded, whatever the file was saved with
    assert tokenizer.decode(token_ids) == "What is 12 + 30?"
    assert tokenizer.vocab_size == 102


def test_special_tokens_are_left_out_of_text_unless_asked_for(tmp_path):
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path))
    token_ids = [*tokenizer.encode("18"), 2]
    assert tokenizer.decode(token_ids) == "18"
    assert tokenizer.decode(token_ids, keep_special_tokens=True) == "18<eos>"


def test_plain_text_gets_the_tokenizers_own_bos_and_a_chat_gets_the_templates(tmp_path):
    directory = make_tokenizer_files(tmp_path, adds_bos=True, chat_template=CHATML)
    tokenizer = PromptTokenizer(directory)
    assert tokenizer.encode("1")[0] == 1
    chat = tokenizer.encode_chat("  1+1  ")
    assert (chat == 1).sum() == 1
    assert tokenizer.decode(chat, keep_special_tokens=True) == "<bos><turn>user: 1+1</turn>\n<turn>assistant: "


def test_the_end_of_a_sequence_is_looked_for_in_every_file(tmp_path):
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path))
    assert tokenizer.eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    assert tokenizer.eos_token_ids == (0, 2, 5)
    make_tokenizer_files(tmp_path / "bare", eos_token=None)
    assert PromptTokenizer(tmp_path / "bare").eos_token_ids == ()
    (tmp_path / "bare" / "special_tokens_map.json").write_text('{"eos_token": {"content": "</turn>"}}')
    assert PromptTokenizer(tmp_path / "bare").eos_token_ids == ()  # tokenizer_config.json says that there is none


def test_the_special_tokens_map_is_used_where_the_config_is_silent(tmp_path):
    make_tokenizer_files(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</turn>"}}')
    assert PromptTokenizer(tmp_path).eos_token_ids == (5,)


def test_a_template_file_is_preferred_and_of_several_templates_the_default_is_taken(tmp_path):
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "config"}]
    make_tokenizer_files(tmp_path, chat_template=named)
    assert PromptTokenizer(tmp_path).decode(PromptTokenizer(tmp_path).encode_chat("x")) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert PromptTokenizer(tmp_path).decode(PromptTokenizer(tmp_path).encode_chat("x")) == "file"


def test_a_template_may_ask_for_the_date_and_for_json(tmp_path):
    source = "{{ strftime_now('%Y') }} {{ messages | tojson }}{% for i in [1, 2] %}{% break %}{% endfor %}"
    make_tokenizer_files(tmp_path, chat_template=source)
    tokenizer = PromptTokenizer(tmp_path, now=lambda: datetime(2031, 1, 1))
    assert tokenizer.decode(tokenizer.encode_chat("<a>")) == '2031 [{"role": "user", "content": "<a>"}]'


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% if %}", "does not compile"),
        ("{{ raise_exception('only tools, please') }}", "only tools, please"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ 1 + 'a' }}", "fails on a user message"),
    ],
)
def test_a_template_that_fails_or_reaches_for_python_is_refused(tmp_path, source, why):
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path, chat_template=source))
    with pytest.raises(ConfigError, match=why):
        tokenizer.encode_chat("x")


def test_a_checkpoint_without_a_template_is_refused_when_one_is_wanted(tmp_path):
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.use_chat_template=true.*legal: false"):
        tokenizer.encode_chat("x")


def test_what_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path=.* is not a directory"):
        PromptTokenizer(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"model\.path=.* has no tokenizer\.json"):
        PromptTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": "what"}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        PromptTokenizer(tmp_path)
    make_tokenizer_files(tmp_path)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read as JSON"):
        _ = PromptTokenizer(tmp_path).eos_token_ids
