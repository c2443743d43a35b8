from __future__ import annotations

import json
import shutil
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from checkpoints import CHATML, make_tokenizer_files
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.errors import ConfigError


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


def test_a_text_that_was_rendered_before_gets_no_second_beginning(tmp_path):
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path, adds_bos=True))
    text = "<bos><turn>user: 1</turn>"
    assert tokenizer.encode(text).tolist() == tokenizer.encode_rendered(text).tolist()
    assert tokenizer.lengths([(text, False), ("1", False), ("1", True)]) == [len(tokenizer.encode(text)), 2, 1]


def test_the_end_of_a_sequence_is_looked_for_in_every_file(tmp_path):
    assert PromptTokenizer(make_tokenizer_files(tmp_path)).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    assert PromptTokenizer(tmp_path).eos_token_ids == (0, 2, 5)
    make_tokenizer_files(tmp_path / "bare", eos_token=None)
    assert PromptTokenizer(tmp_path / "bare").eos_token_ids == ()
    (tmp_path / "bare" / "special_tokens_map.json").write_text('{"eos_token": {"content": "</turn>"}}')
    assert PromptTokenizer(tmp_path / "bare").eos_token_ids == ()  # tokenizer_config.json says that there is none


def test_what_ends_a_sequence_is_asked_for_with_every_group_and_read_once(tmp_path):
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path))
    ends = tokenizer.eos_token_ids
    shutil.rmtree(tmp_path)
    assert tokenizer.eos_token_ids == ends == (2,)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, (2, 5)),  # of a base model: its end of sequence is no end of a turn
        ("{% for m in messages %}<turn>{{ m['content'] }} {{ eos_token }}{% endfor %}", (2,)),
        ("{% for m in messages %}<turn>{{ m['content'] }} and so on{% endfor %}", (2,)),
        ("<turn>{{ messages[0]['content'] }}", (2,)),  # which shows no answer
        ("{{ raise_exception('only tools') }}", (2,)),
        (CHATML.replace("| trim", "| trim | upper"), (2,)),
        (None, (2,)),
    ],
)
def test_what_ends_an_answer_in_the_template_ends_a_completion(tmp_path, template, ends):
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path, chat_template=template))
    assert tokenizer.stop_token_ids == ends
    assert tokenizer.eos_token_ids == (2,)


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


THINKS = (
    "{% for m in messages %}<turn>{{ m['content'] }}</turn>{% endfor %}{% if add_generation_prompt %}<turn>"
    "{% if enable_thinking is defined and enable_thinking is false %}no thought{% endif %}{% endif %}"
)
DATED = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}{% set date_string = strftime_now('%d') %}"
    "{% else %}{% set date_string = '26' %}{% endif %}{% endif %}{{ date_string }}{{ bos_token }}"
)


def test_variables_of_a_template_are_set_and_what_it_does_not_read_is_refused(tmp_path):
    make_tokenizer_files(tmp_path, chat_template=THINKS)

    def prompt(**kwargs):
        tokenizer = PromptTokenizer(tmp_path, kwargs)
        return tokenizer.decode(tokenizer.encode_chat("1"), keep_special_tokens=True)

    assert prompt() == prompt(enable_thinking=True) == "<turn>1</turn><turn>"
    assert prompt(enable_thinking=False) == "<turn>1</turn><turn>no thought"
    with pytest.raises(ConfigError, match=r"has 'enable_thought', which the chat template .*legal: enable_thinking$"):
        prompt(enable_thought=False)
    with pytest.raises(ConfigError, match=r"has 'messages', which the chat template .*legal: enable_thinking$"):
        prompt(messages="x")
    (tmp_path / "chat_template.jinja").write_text(DATED)
    assert prompt(date_string="1 Jan") == "1 Jan<bos>"


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
    with pytest.raises(
        ConfigError, match=r"no chat template .*data\.use_chat_template=true.*legal: .*use_chat_template=false"
    ):
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


# ------------------------------------------------------------------------------------------------ characters and tokens


def make_bytewise(directory: Path) -> PromptTokenizer:
    """Bytes, some pairs of them merged: characters of several tokens, and tokens of several characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("\u0120", "a"), ("\u00c3", "\u00a9")]
    words = ["<eos>", *letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return saved(tokenizer, directory)


def make_of_words(directory: Path) -> PromptTokenizer:
    """As SentencePiece: blanks belong to the words behind them, and the text begins without one."""
    words = ["<eos>", *("\u2581" + word for word in ("", "a", "bc", "def")), "a", "bc", "def", "é", "–"]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<eos>"])
    return saved(tokenizer, directory)


def saved(tokenizer: Tokenizer, directory: Path) -> PromptTokenizer:
    tokenizer.save(str(directory / "tokenizer.json"))
    return PromptTokenizer(directory)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (make_bytewise, ["abc", " a", "é", "日本", "🙂", "x", " ", "ab"]),
        (make_of_words, ["a", "bc", " def", " ", "é–"]),
    ],
)
def test_a_value_at_a_character_is_at_the_token_with_which_the_text_so_far_is_whole(tmp_path, make, words):
    tokenizer, rng = make(tmp_path), np.random.default_rng(1)
    for _ in range(40):
        ids = [int(i) for i in tokenizer.encode("".join(rng.choice(words, 12)))]
        ids.insert(int(rng.integers(len(ids))), 0)  # a special token, which has no characters
        token_ids = np.array([*ids, 0], np.int32)
        text = tokenizer.decode_completion(token_ids, has_ended=True)
        for num_characters in range(1, len(text) + 1):
            whole = next(
                t for t in range(len(ids)) if tokenizer.decode(ids[: t + 1])[:num_characters] == text[:num_characters]
            )
            assert tokenizer.on_tokens({num_characters: 2.0}, token_ids) == {whole: 2.0}


def test_values_on_one_token_are_added_up_and_a_character_that_never_became_whole_is_at_the_end(tmp_path):
    tokenizer = make_bytewise(tmp_path)
    ids = tokenizer.encode("abcxé")
    assert tokenizer.on_tokens({4: 1.0, 1: 0.25, 3: 0.5}, ids) == {0: 0.75, 1: 1.0}
    cut = tokenizer.encode("x🙂")[:-1]
    text = tokenizer.decode(cut)
    assert tokenizer.on_tokens({len(text): 1.0, 1: 0.5}, cut) == {0: 0.5, len(cut) - 1: 1.0}
    assert tokenizer.on_tokens({}, ids) == {}


def test_bytes_that_are_no_text_are_looked_at_a_few_at_a_time_and_what_follows_them_is_in_its_place(tmp_path):
    tokenizer = make_bytewise(tmp_path)
    broken = tokenizer.encode("🙂")[1:2]
    ids = np.concatenate([tokenizer.encode("x"), np.tile(broken, 20_000), tokenizer.encode("yz")])
    text = tokenizer.decode(ids)
    assert text.endswith("yz")
    began = time.thread_time()
    assert tokenizer.on_tokens({1: 1.0, len(text): 2.0, len(text) - 1: 3.0}, ids) == {
        0: 1.0,
        len(ids) - 2: 3.0,
        len(ids) - 1: 2.0,
    }
    assert (
        time.thread_time() - began < 5
    )  # 0.2 s of this thread; two hundred million tokens if each were decoded with all before it


@pytest.mark.parametrize("make", [make_bytewise, make_of_words])
def test_pieces_of_any_tokens_together_are_their_text_and_each_stands_where_it_is_whole(tmp_path, make):
    tokenizer, rng = make(tmp_path), np.random.default_rng(2)
    for _ in range(60):
        ids = rng.integers(0, tokenizer.vocab_size, int(rng.integers(0, 14))).astype(
            np.int32
        )  # halves of characters, too
        pieces = tokenizer.pieces(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == tokenizer.decode(ids, keep_special_tokens=True)
    ids = np.array([*tokenizer.encode("a"), 0], np.int32)
    assert tokenizer.pieces(ids)[-1] == tokenizer.decode(ids[-1:], keep_special_tokens=True) != ""
