"""Search a local collection of documents, by BM25 (Robertson & Zaragoza 2009, The Probabilistic Relevance Framework).

The library bm25s scores, as Lucene does.  Words are runs of letters and digits, in lower case.
Input: a .jsonl file of {"text": …}, or with a "title".  Output: the best documents as text; ties in the file's order.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from rlhpc.errors import ConfigError

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


class Collection:
    """Documents, indexed."""

    def __init__(self, documents: Sequence[str]) -> None:
        """documents: at least one has a word."""
        from bm25s import BM25  # takes a second, of which runs without a search see nothing

        self._documents = documents
        self._index = BM25(method="lucene", k1=K1, b=B)
        self._index.index([_words(document) for document in documents], show_progress=False)

    def found(self, query: str, count: int) -> str:
        """The best documents that have a word of the query, a paragraph each."""
        words = _words(query)
        scores = self._index.get_scores(words) if words else np.zeros(0)
        having = np.flatnonzero(scores)
        best = having[np.argsort(-scores[having], kind="stable")][:count]
        return "\n\n".join(self._documents[number] for number in best) or "nothing was found"


@cache
def open_collection(path: Path) -> Collection:
    """Read and index a file, once in a process.  Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split(
            "\n"
        )  # splitlines also splits at U+2028, legal inside of JSON
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"environment.corpus={path} cannot be read: {error}") from error
    documents = [_document(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not any(map(_WORD.search, documents)):
        raise ConfigError(f"environment.corpus={path} holds no document with a word")
    return Collection(documents)


def _document(line: str, source: str) -> str:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"environment.corpus: {source}: malformed JSON: {error}") from error
    text, title = (fields.get("text"), fields.get("title", "")) if isinstance(fields, dict) else (None, None)
    if not isinstance(text, str) or not isinstance(title, str):
        raise ConfigError(f'environment.corpus: {source}: legal: {{"text": …}}, with a "title" or without')
    return f"{title}\n{text}" if title else text


def _words(text: str) -> list[str]:
    return [*map(sys.intern, _WORD.findall(text.lower()))]  # millions of a few words
