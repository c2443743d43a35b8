"""Stop strings are found where a plain search over the whole text finds them, with little work for each token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from rlhpc.data.tokenizer import PromptTokenizer, StopSearch, before_stop, stopped_at
from tests.unit.data.chat_models import make_chat_model

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
