"""Tasks "exact_match" and "token_f1": does the answer equal the reference as a text, or how much do they share?

Input: a completion and a reference, which is a text or a JSON list of texts of which the best counts.  Output: a
RewardOutcome.  Texts are compared as SQuAD compares them (Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1): in
lower case, without punctuation, without the articles a, an, the, and with single blanks.  Differs from it: (1) a text
that is nothing but articles or punctuation keeps them, or else saying nothing would be right where the reference is
"A"; (2) numbers keep their sign, point, slash and colon, so that 3.5 is not 35, unless text.punctuation = "all"; (3)
letters are compared however they are composed (NFC), and quotes, dashes and other punctuation beyond ASCII counts as
punctuation, too.

The answer is the last marked one of the completion, or all of it where nothing is marked (marked_answer.py).
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from functools import lru_cache

from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.marked_answer import answer_of, outcome
from rlhpc.rewards.task_settings import task_settings

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SAME = str.maketrans({"−": "-", "–": "-", "‐": "-", "‑": "-", "⁄": "/", "∕": "/"})
# What punctuation says in a number: its sign, the point that it begins with, separators between digits.
_OF_NUMBERS = re.compile(
    r"(?P<sign>(?<![\w.])-(?=[$€£¥]?\.?[0-9]))|(?P<point>(?<![\w.])\.(?=[0-9]))|"
    r"(?<=[0-9]e)-(?=[0-9])|(?<=[0-9])[.,/:^*-](?=[0-9])"
)
_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def exact_match(completion: str, reference: str) -> RewardOutcome:
    """Reward 1.0 if the normalised answer equals a normalised reference, else 0.0.  Raises ValueError: `references`."""
    wanted = {normalised(text) for text in references(reference)}
    answer = answer_of(completion)
    is_correct = normalised(answer) in wanted
    return outcome(float(is_correct), answer, is_correct=is_correct)


def token_f1(completion: str, reference: str) -> RewardOutcome:
    """Reward: the harmonic mean of precision and recall over words, with the best of the references; correct at 1.0.

    Raises ValueError as `references`.
    """
    answer = answer_of(completion)
    words = normalised(answer).split()
    best = max(_f1(words, normalised(text).split()) for text in references(reference))
    return outcome(best, answer, is_correct=best == 1.0)


def check_reference(reference: str) -> None:
    """Raises ValueError as `references`."""
    if not any(text.strip() for text in references(reference)):
        raise ValueError("the reference is empty, so that saying nothing would be right; legal: a text")


def references(reference: str) -> list[str]:
    """The texts that a reference stands for.  Raises ValueError for a JSON list that is empty or holds other things."""
    if not reference.lstrip().startswith("["):
        return [reference]
    try:
        texts = json.loads(reference)
    except ValueError:
        return [reference]  # a text that begins with a bracket
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"reference {reference[:80]!r} is a JSON list; legal: one that holds one text or more, and nothing else"
        )
    return list(texts)


def normalised(text: str) -> str:
    """As SQuAD compares: lower case, no punctuation, no articles, single blanks; what nothing is left of keeps them."""
    lower = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).translate(_SAME).lower())
    bare = _without_punctuation(lower)
    forms = (" ".join(form.split()) for form in (_ARTICLES.sub(" ", bare), bare, lower))
    return next(filter(None, forms), "")


def _without_punctuation(text: str) -> str:
    if task_settings().text.punctuation == "all":
        return "".join(sign for sign in text if not _is_punctuation(sign))
    text = _GROUPS.sub(lambda group: group[0].replace(",", ""), text)
    kept = {match.start(): {"sign": " -", "point": " 0."}.get(match.lastgroup or "", match[0])
            for match in _OF_NUMBERS.finditer(text)}  # fmt: skip
    bare = "".join(kept.get(place) or ("" if _is_punctuation(sign) else sign) for place, sign in enumerate(text))
    return bare.replace("- 0.", "-0.")


@lru_cache(1024)
def _is_punctuation(sign: str) -> bool:
    return sign in string.punctuation or (not sign.isascii() and unicodedata.category(sign)[0] == "P")


def _f1(words: list[str], wanted: list[str]) -> float:
    if not words or not wanted:
        return float(words == wanted)
    num_common = (Counter(words) & Counter(wanted)).total()
    return 2 * num_common / (len(words) + len(wanted))
