"""Instructions whose following a program can see, under the names that IFEval gives them (arXiv:2311.07911, table 1).

Input: a text, the arguments of an instruction.  Output: whether the text follows it.  Pure, the standard library only.

Differs from the paper's own program: (1) sentences end at . ! or ? before a blank or the end, but for common
abbreviations and initials: no trained splitter; (2) a keyword is a text, not a pattern; (3) change_case:english_* look
at letters and not at the language; (4) a word in capitals is a run of letters, digits, ' and -; (5) there is no
language:response_language, which takes a detector of languages; (6) --- is a rule and no bullet, and a postscript
begins a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

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
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_QUOTES = "\"'“”‘’"


@dataclass(frozen=True, slots=True)
class Instruction:
    """How one instruction is checked, and its arguments: name → kind (instruction_following.py checks them)."""

    follows: Callable[[str, Arguments], bool]
    arguments: Mapping[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------------ keywords


def _has_keywords(text: str, to: Arguments) -> bool:
    return all(word.lower() in text.lower() for word in to["keywords"])


def _has_keyword_often(text: str, to: Arguments) -> bool:
    return _stands_to(text.lower().count(to["keyword"].lower()), to["frequency"], to["relation"])


def _has_no_forbidden_word(text: str, to: Arguments) -> bool:
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in to["forbidden_words"])


def _has_letter_often(text: str, to: Arguments) -> bool:
    return _stands_to(text.lower().count(to["letter"].lower()), to["let_frequency"], to["let_relation"])


# ------------------------------------------------------------------------------------------------------------- lengths


def num_sentences(text: str) -> int:
    """Sentences of a text; what follows the last end of a sentence counts as one."""
    count, begin = 0, 0
    for end in _SENTENCE_END.finditer(text):
        if not (end[0] == "." and _goes_on(text[begin : end.start()]) and text[end.end() :].strip()):
            count, begin = count + 1, end.end()
    return count + bool(text[begin:].strip())


def _goes_on(before: str) -> bool:
    """Whether a full stop after this belongs to an abbreviation, an initial or the number of a list item."""
    match = _LAST_WORD.search(before[-_LONGEST_ABBREVIATION:])
    word = match[0].lower() if match else ""
    is_initial = len(word) == 1 and word.isalpha() and word != "i"
    return is_initial or word in _ABBREVIATIONS or (word.isdigit() and before.strip() == word)


def _has_sentences(text: str, to: Arguments) -> bool:
    return _stands_to(num_sentences(text), to["num_sentences"], to["relation"])


def _has_words(text: str, to: Arguments) -> bool:
    return _stands_to(len(re.findall(r"\w+", text)), to["num_words"], to["relation"])


def _has_paragraphs(text: str, to: Arguments) -> bool:
    """Whether there are so many paragraphs, divided by ***, none of them empty."""
    parts = _divided(text, "***")
    return all(parts) and len(parts) == int(to["num_paragraphs"])


def _divided(text: str, divider: str) -> list[str]:
    """What stands between dividers, stripped; without the first and the last where they are empty."""
    parts = [part.strip() for part in text.split(divider)]
    if len(parts) > 1:
        parts = parts[not parts[0] : len(parts) - (not parts[-1])]
    return parts


def _begins_paragraph_with(text: str, to: Arguments) -> bool:
    """This number of paragraphs, divided by blank lines; the n-th begins with this word."""
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != to["num_paragraphs"]:
        return False
    first = re.match(r"[\w'’-]*", paragraphs[to["nth_paragraph"] - 1].lstrip(_QUOTES + "*_#([ "))
    return first is not None and first[0].rstrip(_QUOTES).lower() == to["first_word"].lower()


# -------------------------------------------------------------------------------------------------- content and format


def _has_placeholders(text: str, to: Arguments) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= int(to["num_placeholders"])


def _has_postscript(text: str, to: Arguments) -> bool:
    """A line begins with the marker; blanks between its letters do not count ("P. S.")."""
    marker = "".join(to["postscript_marker"].lower().split())
    pattern = r"[ \t]*".join(map(re.escape, marker))
    return re.search(rf"^[ \t*_]*{pattern}", text, re.IGNORECASE | re.MULTILINE) is not None


def _has_bullets(text: str, to: Arguments) -> bool:
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-(?!-))[ \t]*\S", text, re.MULTILINE)) == int(to["num_bullets"])


def _is_one_of_the_answers(text: str, _to: Arguments) -> bool:
    return any(answer in text for answer in _ANSWERS)


def _has_highlights(text: str, to: Arguments) -> bool:
    """*like this* or **like this**, on one line and not empty."""
    found = re.findall(r"\*\*([^*\n]+)\*\*|\*([^*\n]+)\*", text)
    return sum(1 for pair in found if "".join(pair).strip()) >= int(to["num_highlights"])


def _has_sections(text: str, to: Arguments) -> bool:
    marks = re.findall(rf"{re.escape(to['section_spliter'].strip())}\s?\d+", text)
    return len(marks) >= int(to["num_sections"])


def _is_json(text: str, _to: Arguments) -> bool:
    """Whether a text is JSON, with a fence around it or without."""
    whole = text.strip()
    if len(whole) >= 6 and whole.startswith("```") and whole.endswith("```"):
        text = whole[7:-3] if whole[3:7].lower() == "json" else whole[3:-3]
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str, _to: Arguments) -> bool:
    """<<like this>>, on one line; by hand, since a pattern would try each of many << that no >> follows."""
    for line in text.split("\n"):
        begin = line.find("<<")
        while begin >= 0 and (end := line.find(">>", begin + 3)) >= 0:
            if line[begin + 2 : end].strip(" <>"):
                return True
            begin = line.find("<<", end + 2)
    return False


def _has_two_responses(text: str, _to: Arguments) -> bool:
    """Divided by ******, and not the same."""
    parts = _divided(text, "******")
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _repeats_the_prompt(text: str, to: Arguments) -> bool:
    return text.strip().lower().startswith(to["prompt_to_repeat"].strip().lower())


# ----------------------------------------------------------------------------------------- beginning, end, case, comma


def _ends_with(text: str, to: Arguments) -> bool:
    return text.strip().strip('"').rstrip().lower().endswith(to["end_phrase"].strip().lower())


def _is_quoted(text: str, _to: Arguments) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


def _has_capital_words(text: str, to: Arguments) -> bool:
    words = [word for word in re.findall(r"[\w'’-]+", text) if word.isupper()]
    return _stands_to(len(words), to["capital_frequency"], to["capital_relation"])


def _is_upper(text: str, _to: Arguments) -> bool:
    return text.isupper()


def _is_lower(text: str, _to: Arguments) -> bool:
    return text.islower()


def _has_no_comma(text: str, _to: Arguments) -> bool:
    return "," not in text


def _stands_to(count: int, number: int, relation: str) -> bool:
    return count >= number if relation == AT_LEAST else count < number


INSTRUCTIONS: Mapping[str, Instruction] = MappingProxyType(
    {
        "keywords:existence": Instruction(_has_keywords, {"keywords": "texts"}),
        "keywords:frequency": Instruction(
            _has_keyword_often, {"keyword": "text", "frequency": "count", "relation": "relation"}
        ),
        "keywords:forbidden_words": Instruction(_has_no_forbidden_word, {"forbidden_words": "texts"}),
        "keywords:letter_frequency": Instruction(
            _has_letter_often, {"letter": "letter", "let_frequency": "count", "let_relation": "relation"}
        ),
        "length_constraints:number_sentences": Instruction(
            _has_sentences, {"num_sentences": "count", "relation": "relation"}
        ),
        "length_constraints:number_words": Instruction(_has_words, {"num_words": "count", "relation": "relation"}),
        "length_constraints:number_paragraphs": Instruction(_has_paragraphs, {"num_paragraphs": "count"}),
        "length_constraints:nth_paragraph_first_word": Instruction(
            _begins_paragraph_with, {"num_paragraphs": "place", "nth_paragraph": "place", "first_word": "text"}
        ),
        "detectable_content:number_placeholders": Instruction(_has_placeholders, {"num_placeholders": "count"}),
        "detectable_content:postscript": Instruction(_has_postscript, {"postscript_marker": "text"}),
        "detectable_format:number_bullet_lists": Instruction(_has_bullets, {"num_bullets": "count"}),
        "detectable_format:constrained_response": Instruction(_is_one_of_the_answers),
        "detectable_format:number_highlighted_sections": Instruction(_has_highlights, {"num_highlights": "count"}),
        "detectable_format:multiple_sections": Instruction(
            _has_sections, {"section_spliter": "text", "num_sections": "count"}
        ),
        "detectable_format:json_format": Instruction(_is_json),
        "detectable_format:title": Instruction(_has_title),
        "combination:two_responses": Instruction(_has_two_responses),
        "combination:repeat_prompt": Instruction(_repeats_the_prompt, {"prompt_to_repeat": "text"}),
        "startend:end_checker": Instruction(_ends_with, {"end_phrase": "text"}),
        "startend:quotation": Instruction(_is_quoted),
        "change_case:capital_word_frequency": Instruction(
            _has_capital_words, {"capital_frequency": "count", "capital_relation": "relation"}
        ),
        "change_case:english_capital": Instruction(_is_upper),
        "change_case:english_lowercase": Instruction(_is_lower),
        "punctuation:no_comma": Instruction(_has_no_comma),
    }
)
