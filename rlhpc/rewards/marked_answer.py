r"""The answer in a completion: the last marked part.

A mark is \boxed{…}, \fbox{…}, both also without braces as TeX reads them (\boxed 5), or "#### …" up to the end of its
line.  Marks of Markdown around what it holds (**5**, `5`) are left out.
"""

from __future__ import annotations

import re

from rlhpc.contracts import RewardOutcome

LONGEST_ANSWER = 1_000  # characters; a longer one is an attack on a parser or a loop, never an answer
_HASH_MARK = re.compile(r"####([^\n]*)")
_BOXED_MARK = re.compile(r"\\(?:boxed|fbox)\s*\{")
# \boxed 5, as TeX reads it: a number, a letter or a command up to the end of the formula.
_BARE_MARK = re.compile(
    r"\\(?:boxed|fbox)(?:\s+|(?=\\|[0-9]))([+-]?[$0-9][0-9.,/%]*|[A-Za-z](?![A-Za-z'])|\\[A-Za-z]+[^$\n]*)"
)
_EMPHASIS = re.compile(r"(\*\*\*|\*\*|\*|__|_|``|`)(.+)\1", re.DOTALL)
_SHOWN_CHARACTERS = 80


def last_marked_answer(text: str) -> str | None:
    r"""Return what the last \boxed{…} or "#### …" holds, stripped; None where there is no mark.

    A brace that is never closed makes its mark void: the completion was cut off inside its answer.
    """
    mark = last_mark(text)
    return None if mark is None else _without_emphasis(mark[1])


def last_mark(text: str) -> tuple[int, str] | None:
    """Return where the last mark begins and what it holds; None where there is none."""
    marked = [(match.start(), match[1]) for match in _HASH_MARK.finditer(text)][-1:]
    end = len(text)
    for match in reversed(list(_BOXED_MARK.finditer(text))):
        if (content := braced(text, match.end(), end)) is not None:
            marked.append((match.start(), content))
            break
        end = match.start()  # a box around one that is never closed is not closed either: each brace is looked at once
    if bare := list(_BARE_MARK.finditer(text)):
        marked.append((bare[-1].start(), bare[-1][1].rstrip(".,;")))
    # The one that begins last: in "#### \\boxed{18}" and in nested boxes that is the innermost.
    return max(marked, default=None)


def _without_emphasis(text: str) -> str:
    """Return a text without the marks of Markdown around it; "**#### 5**" leaves two at its end."""
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
    """What the last pair of tags holds; None where there is none.  Each character is looked at once.

    A pattern with ".*?" would look for an end behind each of the beginnings: minutes, where a text is full of them.
    """
    found, place = None, 0
    while (start := text.find(begin, place)) >= 0 and (stop := text.find(end, start + len(begin))) >= 0:
        found, place = text[start + len(begin) : stop], stop + len(end)
    return found


def answer_of(completion: str) -> str:
    """The last marked answer, or the whole completion where nothing is marked; stripped."""
    marked = last_marked_answer(completion)
    return completion.strip() if marked is None else marked


def outcome(reward: float, answer: str, *, is_correct: bool) -> RewardOutcome:
    """An outcome with the answer, and its beginning as the detail."""
    return RewardOutcome(
        reward, is_correct, detail=f"answer {answer[:_SHOWN_CHARACTERS]}", answer=answer[:LONGEST_ANSWER]
    )
