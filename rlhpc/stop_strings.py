"""Find the token with which a completion's text first contains one of generation.stop.

Input: tokens, and the tokenizer's decoding function.  Output: the number of tokens up to and including that one, which
is where the completion ends; and the text before the string, which is what is judged.  Pure.

The text is that of the completion alone, without special tokens.  Tokens are decoded a few at a time, so that the work
for each does not grow with the completion; bytes that may be the beginning of a character wait for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are no character, or not yet one
_MOST_UNFINISHED = 3  # bytes of a character without its last one
_MOST_TOKENS = 8  # that are decoded together
_KEPT_TOKENS = 4  # of them when the first are dropped: one more than a character can be unfinished for


def no_text(_token_ids: Sequence[int]) -> str:
    """Decode for an engine that is given no stop strings."""
    raise AssertionError("stop strings for an engine that cannot decode")


class StopSearch:
    """The search in one completion, or one turn of a dialogue, which is read from its beginning."""

    def __init__(self, decode: Decode, stop_strings: Sequence[str]) -> None:
        """decode: tokens → text; stop_strings: without U+FFFD, none empty."""
        self._decode, self._stop_strings = decode, tuple(stop_strings)
        self._longest = max(map(len, self._stop_strings), default=0)
        self._window: list[int] = []  # the last tokens
        self._num_shown = 0  # characters of the window's text that have been searched
        self._tail = ""  # the last characters that have been searched
        self.num_tokens = 0  # that were read
        self.end: int | None = None  # tokens up to and including the one that completes a stop string

    def read(self, token_ids: Sequence[int]) -> int | None:
        """Read the tokens that come next, none after the one that completes a stop string; return `end`."""
        if not self._stop_strings:
            return None
        for token_id in token_ids:
            if self.end is not None:
                break
            self.num_tokens += 1
            text = self._tail + self._shown_by(token_id)
            if any(each in text for each in self._stop_strings):
                self.end = self.num_tokens
            self._tail = text[max(0, len(text) - self._longest + 1) :]
        return self.end

    def _shown_by(self, token_id: int) -> str:
        """The characters that this token completes."""
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = max(len(text.rstrip(UNFINISHED)), len(text) - _MOST_UNFINISHED)
        shown = text[self._num_shown : whole]
        self._num_shown = max(self._num_shown, whole)
        if len(self._window) >= _MOST_TOKENS:
            num_waiting = max(0, len(text) - self._num_shown)
            self._window = self._window[-_KEPT_TOKENS:]
            self._num_shown = max(0, len(self._decode(self._window)) - num_waiting)
        return shown


def stopped_at(decode: Decode, stop_strings: Sequence[str], token_ids: Sequence[int]) -> int | None:
    """Number of tokens up to and including the one that completes a stop string; None: none does."""
    return StopSearch(decode, stop_strings).read(token_ids) if stop_strings else None


def before_stop(decode: Decode, stop_strings: Sequence[str], token_ids: Sequence[int]) -> str | None:
    """Text before the stop string that the last token completes; None: it completes none."""
    if not stop_strings or not len(token_ids):
        return None
    text = decode(token_ids)
    known = len(decode(token_ids[:-1]).rstrip(UNFINISHED))
    begins = (text.find(each, max(0, known - len(each) + 1)) for each in stop_strings)
    begin = min((begin for begin in begins if begin >= 0), default=None)
    return None if begin is None else text[:begin]
