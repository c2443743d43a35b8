"""What of a completion is judged, where a model thinks before it answers (data.thinking_end)."""

from __future__ import annotations

THINKING_END = "</think>"  # of most models that think


def answer_of(completion: str, thinking_end: str) -> tuple[str, int]:
    """Return what follows the thinking, without blanks in front, and the number of characters before it.

    thinking_end: "" if the whole completion is the answer.  A completion that never ends its thinking answers nothing.
    """
    if not thinking_end:
        return completion, 0
    answer = completion.partition(thinking_end)[2].lstrip()
    return answer, len(completion) - len(answer)
