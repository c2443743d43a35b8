"""Text to tokens and back, the ends of turns, answers and stop strings, and values at characters."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from checkpoints import CHATML, make_chat_model, make_tokenizer_files
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlhpc.data.tokenizer import PromptTokenizer, StopSearch, answer_of, before_stop, stopped_at
from rlhpc.protocol.errors import ConfigError


def test_text_survives_the_way_to_tokens_and_back_without_special_tokens_unless_asked_for(tmp_path):
    tokenizer = PromptTokenizer(make_tokenizer_files(tmp_path))
    token_ids = tokenizer.encode("What is 12 + 30?")
    assert token_ids.dtype == np.int32
    assert len(token_ids) == 16  # neither cut nor padded, whatever the file was saved with
    assert tokenizer.decode(token_ids) == "What is 12 + 30?"
    assert tokenizer.vocab_size == 102
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
        ConfigError,
        match=r"no chat template .*chat messages and use_chat_template=true need.*legal: .*use_chat_template=false",
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


# -------------------------------------------------------------------------------- Which part of a completion is judged


@pytest.mark.parametrize(
    ("completion", "end", "answer"),
    [
        (" 2</think>3", "", " 2</think>3"),
        ("hm</think>\n\n3 \n", "</think>", "3 \n"),
        ("hm</think>3</think>4", "</think>", "3</think>4"),  # an answer is not made shorter by a second end
        ("</think>", "</think>", ""),
        ("still thinking: 3", "</think>", ""),
        ("", "</think>", ""),
    ],
)
def test_what_follows_the_first_end_of_thinking_is_the_answer(completion: str, end: str, answer: str) -> None:
    found, start = answer_of(completion, end)
    assert found == answer
    assert completion[start:] == answer


# ------------------------------------------- Stop strings are found where a plain search over the whole text finds them

TEXTS = ("a", "b", " a", "</", "answer", ">", "ab", "\n", "é", "€", "😀", "中文", "e\u0301", "  ")
PIECES = tuple(
    sorted({*(text.encode() for text in TEXTS), *(bytes([byte]) for byte in "é€😀中文a".encode()), b"\xff", b""})
)
STOPS = st.text(alphabet="ab </answr>\né€😀中文", min_size=1, max_size=6)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(make_chat_model(tmp_path_factory.mktemp("model") / "model", "qwen2.5"))


def by_bytes(token_ids: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in token_ids).decode("utf-8", "replace")


def plainly(token_ids: Sequence[int], stops: Sequence[str]) -> int | None:
    texts = (by_bytes(token_ids[:end]) for end in range(len(token_ids) + 1))
    return next((end for end, text in enumerate(texts) if any(stop in text for stop in stops)), None)


def tokens_of(*texts: str | bytes) -> list[int]:
    return [PIECES.index(text if isinstance(text, bytes) else text.encode()) for text in texts]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=60), st.lists(STOPS, max_size=4), st.integers(1, 60))
@example(tokens_of("</", "answer", ">"), ["</answer>"], 1)
@example(tokens_of(*[bytes([byte]) for byte in "😀".encode()]), ["😀"], 3)
@example(tokens_of(*[b"\xff"] * 9, *[bytes([byte]) for byte in "€€".encode()]), ["€€"], 2)
@example(tokens_of("ab", "a", "b"), ["ba", "aba"], 1)
def test_the_end_is_where_a_plain_search_finds_it_in_whatever_parts_tokens_come(
    token_ids: list[int], stops: list[str], part: int
) -> None:
    search = StopSearch(by_bytes, stops)
    for begin in range(0, len(token_ids), part):
        search.read(token_ids[begin : begin + part])
    end = plainly(token_ids, stops)
    assert search.end == end
    assert stopped_at(by_bytes, stops, token_ids) == end
    if stops:
        assert search.num_tokens == (len(token_ids) if end is None else end)
    if end is not None:
        text = by_bytes(token_ids[:end])
        assert before_stop(by_bytes, stops, token_ids[:end]) == text[: min(text.find(s) for s in stops if s in text)]
    elif token_ids:
        assert before_stop(by_bytes, stops, token_ids) is None


def test_a_token_costs_the_same_at_the_end_of_a_long_completion_as_at_its_beginning() -> None:
    decoded: list[int] = []

    def counted(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return by_bytes(token_ids)

    search = StopSearch(counted, ["nowhere"])
    search.read(tokens_of("a", b"\xff", b"", b"\xe2") * 1000)
    assert search.num_tokens == 4000
    assert max(decoded) <= 8
    assert len(decoded) < 1.5 * 4000
    assert len(search._tail) < len("nowhere")


def test_pieces_of_real_tokenizers_are_searched_as_their_whole_text_is(tokenizer: PromptTokenizer) -> None:
    for text in ("an <answer>è€🙂</answer> at once", "\n\n😀\n", "two  spaces"):
        ids = tokenizer.encode(text).tolist()
        for begin in range(len(text)):
            stop = text[begin : begin + 4]
            end = stopped_at(tokenizer.decode, [stop], ids)
            texts = [tokenizer.decode(ids[:number]) for number in range(len(ids) + 1)]
            assert end == next(number for number, each in enumerate(texts) if stop in each)


def test_a_space_that_is_dropped_at_the_beginning_of_a_text_is_none_later() -> None:
    """As Llama 2's tokenizer has it, with bytes for what the vocabulary lacks."""
    vocabulary = ["▁a", "▁b", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = Tokenizer(models.BPE({text: place for place, text in enumerate(vocabulary)}, [], byte_fallback=True))
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    euro = [3 + byte for byte in "€".encode()]
    ids = [0, 1, *euro, 0, 2, *[1] * 20, *euro, 0]
    decode = lambda token_ids: model.decode(list(token_ids))  # noqa: E731 - the library wants a list
    whole = model.decode(ids)
    assert whole.startswith("a b€ ab b")
    for begin in range(len(whole)):
        stop = whole[begin : begin + 5]
        texts = [model.decode(ids[:number]) for number in range(len(ids) + 1)]
        assert stopped_at(decode, [stop], ids) == next(number for number, text in enumerate(texts) if stop in text)
    assert stopped_at(decode, [" a b"], ids) is None or " a b" in whole


@pytest.mark.parametrize("stop", ["<|im_end|>", "<|im_start|>"])
def test_a_special_token_is_a_stop_token_and_no_stop_string(tokenizer: PromptTokenizer, stop: str) -> None:
    ids, strings = tokenizer.ends([stop, "</a>", "x"])
    assert strings == ("</a>", "x")
    assert set(ids) == {*tokenizer.stop_token_ids, *tokenizer.encode_rendered(stop).tolist()}


def test_what_ended_a_completion_is_no_part_of_its_text(tokenizer: PromptTokenizer) -> None:
    stops = ("</answer>", "\n\n")
    ids = tokenizer.encode("7</answer>").tolist()
    assert tokenizer.decode_completion(ids, has_ended=True, stop_strings=stops) == "7"
    assert tokenizer.decode_completion(ids, has_ended=False, stop_strings=stops) == "7</answer>"
    assert tokenizer.decode_completion(ids[:-1], has_ended=True) == tokenizer.decode(ids[:-2])
    end = tokenizer.encode_rendered("<|im_end|>").tolist()
    assert tokenizer.decode_completion([*ids[:-1], *end], has_ended=True, stop_strings=("im_end",)) == "7</answer"
    for keep in (False, True):
        said = [*tokenizer.encode("7").tolist(), *tokenizer.encode_rendered("<|im_start|>").tolist(), *ids]
        text = tokenizer.decode_completion(said, has_ended=True, stop_strings=stops, keep_special_tokens=keep)
        assert text == ("7<|im_start|>7" if keep else "77")
