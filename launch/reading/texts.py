"""Tokens as text if the run's tokenizer is available, otherwise as numbers.

A run directory may be on a machine without the model: its rollouts can be viewed all the same.
"""

from __future__ import annotations

from pathlib import Path

from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.errors import ConfigError
from rlhpc.types import Int32


class Texts:
    """Decodes for people: special tokens are shown, since a prompt's template is made of them."""

    def __init__(self, tokenizer: PromptTokenizer | None) -> None:
        """tokenizer: None shows every token as its number."""
        self._tokenizer = tokenizer

    @property
    def are_known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def whole(self, token_ids: Int32) -> str:
        """Text of all tokens."""
        if self._tokenizer is None:
            return " ".join(map(str, token_ids.tolist()))
        return self._tokenizer.decode(token_ids, keep_special_tokens=True)

    def pieces(self, token_ids: Int32) -> list[str]:
        """Text of each token; a character made of several tokens belongs to the last of them."""
        if self._tokenizer is None:
            return [f"{token} " for token in token_ids.tolist()]
        return self._tokenizer.pieces(token_ids)


def texts_of(model_dir: Path | None, tokenizer_dir: Path | None) -> tuple[Texts, str]:
    """The texts of a run, and the reason why tokens are shown as numbers; "": they are not.

    model_dir: from the run's settings; None: these cannot be read.  tokenizer_dir: given by the user, or None.
    Raises ConfigError: the user's directory has no tokenizer.
    """
    if tokenizer_dir is not None:
        return Texts(PromptTokenizer(tokenizer_dir)), ""
    if model_dir is None:
        return Texts(None), "the run's settings cannot be read: tokens are shown as numbers"
    try:
        return Texts(PromptTokenizer(model_dir)), ""
    except ConfigError as error:
        return Texts(None), f"{error}; tokens are shown as numbers; --tokenizer DIR names a copy of that directory"
