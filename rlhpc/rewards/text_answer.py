"""Tasks that compare an answer with a reference as texts, and extraction of the answer from a completion.

In this file: the last marked answer; "multiple_choice"; "regex"; "exact_match" and "token_f1".

"exact_match": does the answer equal the reference?  "token_f1": how many words do they share?  Input: a completion and
a reference, which is a text or a JSON list of texts of which the best counts.  Output: a RewardOutcome.  Texts are
compared as in SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1): in lower case, without punctuation, without
the articles a, an, the, and with single blanks.  Differs from it: (1) a text that is nothing but articles or
punctuation keeps them, or else an empty answer would be right for the reference "A"; (2) numbers keep their sign,
point, slash and colon, so that 3.5 is not 35, unless text.punctuation = "all"; (3) letters are compared however they
are composed (NFC), and quotes, dashes and other punctuation beyond ASCII counts as punctuation, too.

Their answer is the last marked one of the completion, or all of it if nothing is marked.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from functools import lru_cache

from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.rewards.task_settings import task_settings

# -------------------------------------------------------------------------------------------------------- marked answer
#
# The answer in a completion: the last marked part.
#
# A mark is \boxed{…}, \fbox{…}, both also without braces as TeX reads them (\boxed 5), or "#### …" up to the end of its
# line.  Markdown around the content (**5**, `5`) is removed.

LONGEST_ANSWER = 1_000  # characters; a longer one is an attack on a parser or a loop, never an answer
_HASH_MARK = re.compile(r"####([^\n]*)")
_BOXED_MARK = re.compile(r"\\(?:boxed|fbox)\s*\{")
# \boxed 5, as TeX reads it: a number, a letter or a command up to the end of the formula.
_BARE_MARK = re.compile(
    r"\\(?:boxed|fbox)(?:\s+|(?=\\|[0-9]))([+-]?[$0-9][0-9.,/%]*|[A-Za-z](?![A-Za-z'])|\\[A-Za-z]+[^$\n]*)"
)
_EMPHASIS = re.compile(r"(\*\*\*|\*\*|\*|__|_|``|`)(.+)\1", re.DOTALL)
_SHOWN_CHARACTERS = 80


MARKS = ("####", "\\boxed{")  # as prompts ask for them
MARKED = frozenset(("math_answer", "multiple_choice"))  # tasks that look for them


def last_marked_answer(text: str) -> str | None:
    r"""Return the content of the last \boxed{…} or "#### …", stripped; None if there is no mark.

    A brace that is never closed makes its mark void: the completion was cut off inside its answer.
    """
    mark = last_mark(text)
    return None if mark is None else _without_emphasis(mark[1])


def last_mark(text: str) -> tuple[int, str] | None:
    """Return begin and content of the last mark; None if there is none."""
    marked = [(match.start(), match[1]) for match in _HASH_MARK.finditer(text)][-1:]
    end = len(text)
    for match in reversed(list(_BOXED_MARK.finditer(text))):
        if (content := braced(text, match.end(), end)) is not None:
            marked.append((match.start(), content))
            break
        end = match.start()  # a box around an unclosed one is not closed either: each brace is read once
    if bare := list(_BARE_MARK.finditer(text)):
        marked.append((bare[-1].start(), bare[-1][1].rstrip(".,;")))
    # The mark that begins last: in "#### \\boxed{18}" and in nested boxes the innermost.
    return max(marked, default=None)


def _without_emphasis(text: str) -> str:
    """Return a text without Markdown's emphasis around it; "**#### 5**" leaves two asterisks at its end."""
    text = text.strip()
    while match := _EMPHASIS.fullmatch(text):
        text = match[2].strip()
    return text[:-2].rstrip() if text.endswith("**") and text.count("**") == 1 else text


def braced(text: str, start: int, end: int | None = None) -> str | None:
    """Return the text from `start`, just behind an opening brace, to the brace that closes it before `end`."""
    depth, last = 1, start + 2 * LONGEST_ANSWER
    for brace in re.finditer(r"\\.|[{}]", text[start : last if end is None else min(last, end)], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def last_tagged(text: str, begin: str, end: str) -> str | None:
    """Content of the last pair of tags; None if there is none.  Each character is read once.

    A pattern with ".*?" would search an end for each beginning: minutes for a text full of them.
    """
    found, place = None, 0
    while (start := text.find(begin, place)) >= 0 and (stop := text.find(end, start + len(begin))) >= 0:
        found, place = text[start + len(begin) : stop], stop + len(end)
    return found


def answer_of(completion: str) -> str:
    """The last marked answer, or the whole completion if nothing is marked; stripped."""
    marked = last_marked_answer(completion)
    return completion.strip() if marked is None else marked


def outcome(reward: float, answer: str, *, is_correct: bool) -> RewardOutcome:
    """An outcome with the answer, and its beginning as the detail."""
    return RewardOutcome(
        reward, is_correct, detail=f"answer {answer[:_SHOWN_CHARACTERS]}", answer=answer[:LONGEST_ANSWER]
    )


# ------------------------------------------------------------------------------------------------------ multiple choice
#
# Task "multiple_choice": is the chosen letter the right one?
#
# Input: a completion and a reference, one letter.  Output: a RewardOutcome of 1.0 or 0.0.
#
# Only a marked choice counts, and only the mark that begins last: \boxed{…}, "#### …", or a line that begins with
# "Answer:"; a completion that is only a choice needs no mark.  A choice is one letter, as "B", "(B)", "B." or "B)",
# perhaps followed by a text ("B. Paris"); two letters ("A or B") are none, so that listing many gains nothing.

_ANSWER_LINE = re.compile(r"^[ \t*]*answer[ \t*]*:[ \t*]*([^\n]*)", re.IGNORECASE | re.MULTILINE)
_IN_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_BLANK = re.compile(r"\\[ ,;:!]|~")
_CHOICE = re.compile(r"[(\[]?([A-Za-z])(?:[)\].:]+(?:\s.*)?|\**)", re.DOTALL)
_SECOND = re.compile(r"[(\[][A-Za-z][)\]]|\b[A-Z]\)|\b(?:or|and)\s+[A-Z]\b")


def multiple_choice(completion: str, reference: str) -> RewardOutcome:
    """Reward 1.0 if the letters are equal, in either case.  Raises ValueError if the reference is not one letter."""
    wanted = _wanted(reference)
    marked = [(match.start(), match[1]) for match in _ANSWER_LINE.finditer(completion)]
    if (mark := last_mark(completion)) is not None:
        marked.append(mark)
    chosen = _letter(max(marked)[1] if marked else completion)
    is_correct = chosen == wanted
    return outcome(float(is_correct), chosen or "", is_correct=is_correct)


def check_multiple_choice(reference: str) -> None:
    """Raise ValueError for a reference that is not one letter."""
    _wanted(reference)


def _wanted(reference: str) -> str:
    letter = _letter(reference)
    if letter is None:
        raise ValueError(f"reference {reference[:80]!r} is not one letter; legal: B, (B) or B.")
    return letter


def _letter(text: str) -> str | None:
    """The one letter that a text chooses, in upper case; None: none, or more than one."""
    text = _BLANK.sub(" ", _IN_TEXT.sub(r"\1", text)).strip().strip("$*").strip()
    match = _CHOICE.fullmatch(text)
    if match is None or _SECOND.search(text[match.end(1) :].lstrip(").]:")):
        return None
    return match[1].upper()


# ---------------------------------------------------------------------------------------------------------------- regex
#
# Task "regex": does the answer match the pattern that is the reference?
#
# Input: a completion and a reference, which is a Python regular expression.  Output: a RewardOutcome of 1.0 or 0.0.
#
# The whole answer must match; flags are part of the pattern ("(?i)yes").  The answer is the last marked one, or the
# whole completion.  A pattern that takes exponential time is ended by rewards.timeout_s: a verifier error.


def regex(completion: str, reference: str) -> RewardOutcome:
    """Reward 1.0 if the pattern matches the whole answer, else 0.0.  Raises ValueError if the reference is none."""
    answer = answer_of(completion)
    is_correct = _compiled(reference).fullmatch(answer) is not None
    return outcome(float(is_correct), answer, is_correct=is_correct)


def check_regex(reference: str) -> None:
    """Raise ValueError for a reference that is not a regular expression."""
    _compiled(reference)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"reference {pattern[:80]!r} is not a regular expression: {error}; legal: one of Python's re"
        ) from error


# ----------------------------------------------------------------------------------------------------------- text match

_SAME = str.maketrans({"−": "-", "–": "-", "‐": "-", "‑": "-", "⁄": "/", "∕": "/"})
# Punctuation that belongs to a number: its sign, a leading point, separators between digits.
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


def check_text_match(reference: str) -> None:
    """Raises ValueError as `references`."""
    if not any(text.strip() for text in references(reference)):
        raise ValueError("the reference is empty, so that saying nothing would be right; legal: a text")


def references(reference: str) -> list[str]:
    """The alternatives of a reference.  Raises ValueError for a JSON list that is empty or holds other types."""
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
    """The text as normalised by SQuAD: lower case, no punctuation or articles, single blanks; if empty, unchanged."""
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
