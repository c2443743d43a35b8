"""Instructions that a program can verify, by their names in IFEval (arXiv:2311.07911, table 1).

Input: a text, the arguments of an instruction.  Output: whether the text follows it.  Pure, the standard library only.

Differs from the paper's own program: (1) sentences end at . ! or ? before a blank or the end, except after common
abbreviations and initials: no trained splitter; (2) a keyword is a text, not a pattern; (3) change_case:english_* check
letters and not the language; (4) a word in capitals is a run of letters, digits, ' and -; (5) there is no
language:response_language, which needs a detector of languages; (6) --- is a rule and no bullet, and a postscript
begins a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any

from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.rewards.task_settings import task_settings

# --------------------------------------------------------------------------------------------------------- instructions

Arguments = Mapping[str, Any]
AT_LEAST, LESS_THAN = "at least", "less than"
REFUSED: Mapping[str, str] = MappingProxyType(
    {"language:response_language": "it takes a detector of languages, which rlhpc does not have"}
)

_ABBREVIATIONS = frozenset(
    {"mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "etc", "no", "inc", "ltd", "co", "dept", "fig", "e.g",
     "i.e", "a.m", "p.m", "u.s"}
)  # fmt: skip
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]+[\"'”’)\]*_]*(?=\s|$)")
_LONGEST_ABBREVIATION = 8  # characters, and one more
_LAST_WORD = re.compile(r"[\w.]*$")
_BULLET = re.compile(r"^[ \t]*(?:\*(?!\*)|-(?!-))[ \t]*\S", re.MULTILINE)
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_QUOTES = "\"'“”‘’"


@dataclass(frozen=True, slots=True)
class Instruction:
    """Check of one instruction, and its arguments: name → kind."""

    follows: Callable[[str, Arguments], bool]
    arguments: Mapping[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------------- lengths


def num_sentences(text: str) -> int:
    """Number of sentences of a text; text after the last end of a sentence counts as one."""
    count, begin = 0, 0
    for end in _SENTENCE_END.finditer(text):
        if not (end[0] == "." and _goes_on(text[begin : end.start()]) and text[end.end() :].strip()):
            count, begin = count + 1, end.end()
    return count + bool(text[begin:].strip())


def _goes_on(before: str) -> bool:
    """True if a full stop after this text belongs to an abbreviation, an initial or the number of a list item."""
    match = _LAST_WORD.search(before[-_LONGEST_ABBREVIATION:])
    word = match[0].lower() if match else ""
    is_initial = len(word) == 1 and word.isalpha() and word != "i"
    return is_initial or word in _ABBREVIATIONS or (word.isdigit() and before.strip() == word)


def _has_paragraphs(text: str, to: Arguments) -> bool:
    """True for num_paragraphs paragraphs, divided by ***, none of them empty."""
    parts = _divided(text, "***")
    return all(parts) and len(parts) == int(to["num_paragraphs"])


def _divided(text: str, divider: str) -> list[str]:
    """Parts between dividers, stripped; without the first and the last if they are empty."""
    parts = [part.strip() for part in text.split(divider)]
    if len(parts) > 1:
        parts = parts[not parts[0] : len(parts) - (not parts[-1])]
    return parts


def _begins_paragraph_with(text: str, to: Arguments) -> bool:
    """True for num_paragraphs paragraphs, divided by blank lines, of which the n-th begins with this word."""
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != to["num_paragraphs"]:
        return False
    first = re.match(r"[\w'’-]*", paragraphs[to["nth_paragraph"] - 1].lstrip(_QUOTES + "*_#([ "))
    return first is not None and first[0].rstrip(_QUOTES).lower() == to["first_word"].lower()


# -------------------------------------------------------------------------------------------------- content and format


def _has_postscript(text: str, to: Arguments) -> bool:
    """True if a line begins with the marker; blanks between its letters do not count ("P. S.")."""
    marker = "".join(to["postscript_marker"].lower().split())
    pattern = r"[ \t]*".join(map(re.escape, marker))
    return re.search(rf"^[ \t*_]*{pattern}", text, re.IGNORECASE | re.MULTILINE) is not None


def _has_highlights(text: str, to: Arguments) -> bool:
    """True for enough highlights, *like this* or **like this**, on one line and not empty."""
    found = re.findall(r"\*\*([^*\n]+)\*\*|\*([^*\n]+)\*", text)
    return sum(1 for pair in found if "".join(pair).strip()) >= int(to["num_highlights"])


def _is_json(text: str, _to: Arguments) -> bool:
    """True if a text is JSON, with or without a fence around it."""
    whole = text.strip()
    if len(whole) >= 6 and whole.startswith("```") and whole.endswith("```"):
        text = whole[7:-3] if whole[3:7].lower() == "json" else whole[3:-3]
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str, _to: Arguments) -> bool:
    """True for a title <<like this>> on one line; no pattern, which would try each of many << without a >>."""
    for line in text.split("\n"):
        begin = line.find("<<")
        while begin >= 0 and (end := line.find(">>", begin + 3)) >= 0:
            if line[begin + 2 : end].strip(" <>"):
                return True
            begin = line.find("<<", end + 2)
    return False


def _has_two_responses(text: str, _to: Arguments) -> bool:
    """True for two different responses, divided by ******."""
    parts = _divided(text, "******")
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _stands_to(count: int, number: int, relation: str) -> bool:
    return count >= number if relation == AT_LEAST else count < number


INSTRUCTIONS: Mapping[str, Instruction] = MappingProxyType(
    {
        "keywords:existence": Instruction(
            lambda text, to: all(word.lower() in text.lower() for word in to["keywords"]), {"keywords": "texts"}
        ),
        "keywords:frequency": Instruction(
            lambda text, to: _stands_to(text.lower().count(to["keyword"].lower()), to["frequency"], to["relation"]),
            {"keyword": "text", "frequency": "count", "relation": "relation"},
        ),
        "keywords:forbidden_words": Instruction(
            lambda text, to: (
                not any(
                    re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in to["forbidden_words"]
                )
            ),
            {"forbidden_words": "texts"},
        ),
        "keywords:letter_frequency": Instruction(
            lambda text, to: _stands_to(
                text.lower().count(to["letter"].lower()), to["let_frequency"], to["let_relation"]
            ),
            {"letter": "letter", "let_frequency": "count", "let_relation": "relation"},
        ),
        "length_constraints:number_sentences": Instruction(
            lambda text, to: _stands_to(num_sentences(text), to["num_sentences"], to["relation"]),
            {"num_sentences": "count", "relation": "relation"},
        ),
        "length_constraints:number_words": Instruction(
            lambda text, to: _stands_to(len(re.findall(r"\w+", text)), to["num_words"], to["relation"]),
            {"num_words": "count", "relation": "relation"},
        ),
        "length_constraints:number_paragraphs": Instruction(_has_paragraphs, {"num_paragraphs": "count"}),
        "length_constraints:nth_paragraph_first_word": Instruction(
            _begins_paragraph_with, {"num_paragraphs": "place", "nth_paragraph": "place", "first_word": "text"}
        ),
        "detectable_content:number_placeholders": Instruction(
            lambda text, to: len(re.findall(r"\[[^\[\]\n]*\]", text)) >= int(to["num_placeholders"]),
            {"num_placeholders": "count"},
        ),
        "detectable_content:postscript": Instruction(_has_postscript, {"postscript_marker": "text"}),
        "detectable_format:number_bullet_lists": Instruction(
            lambda text, to: len(_BULLET.findall(text)) == int(to["num_bullets"]), {"num_bullets": "count"}
        ),
        "detectable_format:constrained_response": Instruction(
            lambda text, to: any(answer in text for answer in _ANSWERS)
        ),
        "detectable_format:number_highlighted_sections": Instruction(_has_highlights, {"num_highlights": "count"}),
        "detectable_format:multiple_sections": Instruction(
            lambda text, to: (
                len(re.findall(rf"{re.escape(to['section_spliter'].strip())}\s?\d+", text)) >= int(to["num_sections"])
            ),
            {"section_spliter": "text", "num_sections": "count"},
        ),
        "detectable_format:json_format": Instruction(_is_json),
        "detectable_format:title": Instruction(_has_title),
        "combination:two_responses": Instruction(_has_two_responses),
        "combination:repeat_prompt": Instruction(
            lambda text, to: text.strip().lower().startswith(to["prompt_to_repeat"].strip().lower()),
            {"prompt_to_repeat": "text"},
        ),
        "startend:end_checker": Instruction(
            lambda text, to: text.strip().strip('"').rstrip().lower().endswith(to["end_phrase"].strip().lower()),
            {"end_phrase": "text"},
        ),
        "startend:quotation": Instruction(
            lambda text, to: len(bare := text.strip()) > 1 and bare[0] == bare[-1] == '"'
        ),
        "change_case:capital_word_frequency": Instruction(
            lambda text, to: _stands_to(
                sum(word.isupper() for word in re.findall(r"[\w'’-]+", text)),
                to["capital_frequency"],
                to["capital_relation"],
            ),
            {"capital_frequency": "count", "capital_relation": "relation"},
        ),
        "change_case:english_capital": Instruction(lambda text, to: text.isupper()),
        "change_case:english_lowercase": Instruction(lambda text, to: text.islower()),
        "punctuation:no_comma": Instruction(lambda text, to: "," not in text),
    }
)


# ------------------------------------------------------------------------------------------------ instruction following
#
# Task "instruction_following": does the completion follow instructions that a program can check?
#
# Input: a completion; reference: JSON, a list of {"id": …, "kwargs": {…}}, or an object with IFEval's own columns,
# {"instruction_id_list": […], "kwargs": [{…}, …]}; other keys are ignored.  Output: a RewardOutcome, by [instructions]
# of the run file.
#
# Strict checks the unchanged completion.  Loose (arXiv:2311.07911, section 2.2) forgives a first line, a last line and
# asterisks: it is enough that one of eight versions of the completion follows an instruction.  An empty version
# follows none.

Wanted = tuple[tuple[str, Arguments], ...]  # (id, arguments) of every instruction of a record


def instruction_following(completion: str, reference: str) -> RewardOutcome:
    """Judge a completion; parts: the shares followed, strictly and loosely.  Raises ValueError for the reference."""
    wanted, settings = _read(reference), task_settings().instructions
    strict, loose = followed([completion], wanted), followed(versions(completion), wanted)
    counted = loose if settings.accuracy == "loose" else strict
    shares = {"strict": sum(strict) / len(wanted), "loose": sum(loose) / len(wanted)}
    is_correct = all(counted)
    reward = shares[settings.accuracy] if settings.reward == "fraction" else float(is_correct)
    missed = [name for (name, _), is_followed in zip(wanted, counted, strict=True) if not is_followed]
    detail = f"{len(wanted) - len(missed)} of {len(wanted)}" + (f"; not: {', '.join(missed)}" if missed else "")
    return RewardOutcome(reward, is_correct, parts=shares, detail=detail)


def check_instruction_following(reference: str) -> None:
    """Raise ValueError for a reference that is no such list, or an instruction that is unknown or lacks an argument."""
    _read(reference)


def followed(texts: Sequence[str], wanted: Wanted) -> list[bool]:
    """True for each instruction that one of the texts follows."""
    return [
        any(text.strip() != "" and INSTRUCTIONS[name].follows(text, arguments) for text in texts)
        for name, arguments in wanted
    ]


def versions(completion: str) -> list[str]:
    """The completion with and without its first line, its last line, and asterisks."""
    lines = completion.split("\n")
    cut = ["\n".join(lines[first : len(lines) - last]).strip() for first, last in product((0, 1), (0, 1))]
    texts = [completion, *cut[1:]]
    return [*texts, *(text.replace("*", "") for text in texts)]


# ----------------------------------------------------------------------------------------------------------- reference


@lru_cache(maxsize=1024)
def _read(reference: str) -> Wanted:
    try:
        found = json.loads(reference)
    except ValueError as error:
        raise ValueError(f"reference {reference[:80]!r} is not JSON: {error}; legal: {_LEGAL}") from error
    pairs = _pairs(found)
    if not pairs:
        raise ValueError(f"reference {reference[:80]!r} has no instruction; legal: {_LEGAL}")
    return tuple((name, _arguments(name, given)) for name, given in pairs)


_LEGAL = '[{"id": "punctuation:no_comma", "kwargs": {}}, …], or IFEval\'s {"instruction_id_list": […], "kwargs": […]}'


def _pairs(found: Any) -> list[tuple[str, dict[str, Any]]]:
    try:
        if isinstance(found, dict):
            names, given = found["instruction_id_list"], found["kwargs"]
            pairs = list(zip(names, given, strict=True))
        else:
            pairs = [(each["id"], each.get("kwargs", {})) for each in found]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"reference {str(found)[:80]}: {type(error).__name__}: {error}; legal: {_LEGAL}") from error
    for name, arguments in pairs:
        if name in REFUSED:
            raise ValueError(f"instruction {name!r}: {REFUSED[name]}; legal: {', '.join(INSTRUCTIONS)}")
        if name not in INSTRUCTIONS:
            raise ValueError(f"instruction {name!r} is unknown; legal: {', '.join(INSTRUCTIONS)}")
        if not isinstance(arguments, dict | None):
            raise ValueError(f"instruction {name!r}: kwargs is {str(arguments)[:40]!r}; legal: an object")  # noqa: TRY004
    return pairs


def _arguments(name: str, given: dict[str, Any] | None) -> Arguments:
    """The instruction's arguments; nulls, as in a table with a column for each argument, are left out."""
    given = {key: value for key, value in (given or {}).items() if value is not None}
    kinds = INSTRUCTIONS[name].arguments
    if set(given) != set(kinds):
        raise ValueError(
            f"instruction {name!r} has the arguments {', '.join(given) or 'none'}; legal: {', '.join(kinds) or 'none'}"
        )
    arguments = {key: _value(name, key, kind, given[key]) for key, kind in kinds.items()}
    if arguments.get("nth_paragraph", 0) > arguments.get("num_paragraphs", 0):
        raise ValueError(
            f"instruction {name!r}: nth_paragraph={arguments['nth_paragraph']}; legal: 1 to num_paragraphs="
            f"{arguments['num_paragraphs']}"
        )
    return arguments


def _value(name: str, key: str, kind: str, value: Any) -> Any:
    if kind in ("count", "place") and isinstance(value, float) and value.is_integer():
        value = int(value)  # as in tables with missing values

    def is_text(value: object) -> bool:
        return isinstance(value, str) and value.strip() != ""

    legal, is_legal = {
        "text": ("a text that is not empty", is_text(value)),
        "letter": ("one character", isinstance(value, str) and len(value) == 1),
        "texts": ("a list of texts", isinstance(value, list) and bool(value) and all(map(is_text, value))),
        "relation": (f"{AT_LEAST!r} or {LESS_THAN!r}", value in (AT_LEAST, LESS_THAN)),
        "count": ("a whole number from 0", type(value) is int and value >= 0),
        "place": ("a whole number from 1", type(value) is int and value >= 1),
    }[kind]
    if not is_legal:
        raise ValueError(f"instruction {name!r}: {key}={value!r}; legal: {legal}")
    return value
