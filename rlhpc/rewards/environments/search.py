"""Search a local collection of documents, by BM25 (Robertson & Zaragoza 2009, The Probabilistic Relevance Framework).

Score of a document for a query: Σ over the query's words of idf · tf (k1 + 1) / (tf + k1 (1 − b + b · length / mean)),
with idf = ln(1 + (N − n + 0.5) / (n + 0.5)).  Words are runs of letters and digits, in lower case.
Input: a .jsonl file of {"text": …}, or with a "title".  Output: the best documents as text; ties in the file's order.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rlhpc.errors import ConfigError

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


class Collection:
    """Documents, indexed."""

    def __init__(self, documents: Sequence[str]) -> None:
        self._documents = documents
        self._postings: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)  # word → (document, times)
        lengths = []
        for number, document in enumerate(documents):
            words = _words(document)
            lengths.append(len(words))
            for word, times in Counter(words).items():
                self._postings[word].append((number, times))
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self._norms = [K1 * (1 - B + B * length / mean) for length in lengths]

    def found(self, query: str, count: int) -> str:
        """The best documents that have a word of the query, a paragraph each."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in _words(query):
            having = self._postings.get(word, ())
            idf = math.log(1 + (len(self._documents) - len(having) + 0.5) / (len(having) + 0.5))
            for number, times in having:
                scores[number] += idf * times * (K1 + 1) / (times + self._norms[number])
        best = sorted(scores, key=lambda number: (-scores[number], number))[:count]
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
    if not documents:
        raise ConfigError(f"environment.corpus={path} holds no document")
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
    return _WORD.findall(text.lower())
