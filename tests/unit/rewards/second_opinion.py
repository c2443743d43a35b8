"""The checks of rlhpc/rewards/instructions.py once more, by another route: walks over characters, lines and words.

Nothing here is shared with them, so that a mistake has to be made twice.
"""

from __future__ import annotations

import json
import re
from typing import Any

SHORT = {"mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "etc", "no", "inc", "ltd", "co", "dept", "fig", "e.g",
         "i.e", "a.m", "p.m", "u.s"}  # fmt: skip


def is_followed(name: str, text: str, to: dict[str, Any]) -> bool:
    return bool(OPINIONS[name](text, to))


def word_character(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


def enough(count: int, number: int, relation: str) -> bool:
    return {"at least": count >= number, "less than": not count >= number}[relation]


def occurrences(text: str, part: str) -> int:
    text, part, count, place = text.casefold(), part.casefold(), 0, 0
    while place < len(text):
        if text[place : place + len(part)] == part:
            count, place = count + 1, place + len(part)
        else:
            place += 1
    return count


def words(text: str, extra: str = "") -> list[str]:
    return "".join(letter if word_character(letter) or letter in extra else " " for letter in text).split()


def forbidden(text: str, to: dict[str, Any]) -> bool:
    low = text.casefold()
    for word in to["forbidden_words"]:
        for place in range(len(low)):
            end = place + len(word)
            if low[place:end] == word.casefold():
                before, after = low[place - 1 : place] if place else "", low[end : end + 1]
                if not (before and word_character(before)) and not (after and word_character(after)):
                    return False
    return True


def sentences(text: str) -> int:
    count, begun, tokens = 0, [], text.split()
    for number, token in enumerate(tokens):
        begun.append(token)
        bare = token.rstrip("\"'”’)]*_")
        if not bare or bare[-1] not in ".!?":
            continue
        stem = bare.rstrip(".!?")
        is_one_stop = bare == token and bare[len(stem) :] == "."
        tail = ""
        for letter in reversed(stem):
            if not (word_character(letter) or letter == "."):
                break
            tail = letter + tail
        tail = tail.lower()
        goes_on = tail in SHORT or (len(tail) == 1 and tail.isalpha() and tail != "i")
        goes_on = goes_on or (tail.isdigit() and begun == [token] and tail == stem)
        if is_one_stop and goes_on and number + 1 < len(tokens):
            continue
        count, begun = count + 1, []
    return count + (1 if begun else 0)


def stars(text: str, divider: str) -> list[str]:
    parts = re.split(re.escape(divider), text)
    while parts and not parts[0].strip() and len(parts) > 1:
        parts = parts[1:]
        break
    if len(parts) > 1 and not parts[-1].strip():
        parts.pop()
    elif len(parts) == 1 and divider in text and not parts[0].strip():
        parts = []
    return [part.strip() for part in parts]


def paragraphs(text: str, to: dict[str, Any]) -> bool:
    parts = stars(text, "***")
    return "" not in parts and len(parts) == to["num_paragraphs"]


def nth_paragraph(text: str, to: dict[str, Any]) -> bool:
    parts = [part for part in re.split(r"\n\n", text) if not part.isspace() and part]
    if len(parts) != to["num_paragraphs"]:
        return False
    chosen = parts[to["nth_paragraph"] - 1].strip()
    while chosen and chosen[0] in "\"'“”‘’*_#([ ":
        chosen = chosen[1:]
    first = ""
    for letter in chosen:
        if not (word_character(letter) or letter in "'’-"):
            break
        first += letter
    while first and first[-1] in "\"'“”‘’":
        first = first[:-1]
    return first.casefold() == to["first_word"].casefold()


def placeholders(text: str, to: dict[str, Any]) -> bool:
    count = 0
    for line in text.split("\n"):
        is_open = False
        for letter in line:
            if letter == "[":
                is_open = True
            elif letter == "]" and is_open:
                count, is_open = count + 1, False
    return count >= to["num_placeholders"]


def postscript(text: str, to: dict[str, Any]) -> bool:
    marker = "".join(letter for letter in to["postscript_marker"] if not letter.isspace()).casefold()
    for line in text.split("\n"):
        bare = line.lstrip(" \t*_").replace(" ", "").replace("\t", "").casefold()
        if bare.startswith(marker):
            return True
    return False


def bullets(text: str, to: dict[str, Any]) -> bool:
    count = 0
    for line in text.split("\n"):
        bare = line.strip(" \t")
        if bare[:1] in ("*", "-") and bare[1:2] != bare[:1] and bare[1:].strip():
            count += 1
    return count == to["num_bullets"]


def highlights(text: str, to: dict[str, Any]) -> bool:
    count = 0
    for line in text.split("\n"):
        place = 0
        while (place := line.find("*", place)) >= 0:
            for mark in ("**", "*"):
                end = line.find("*", place + len(mark))
                inside = line[place + len(mark) : end]
                is_marked = line.startswith(mark, place) and end > place + len(mark)
                if is_marked and line.startswith(mark, end):
                    count += bool(inside.strip())
                    place = end + len(mark)
                    break
            else:
                place += 1
    return count >= to["num_highlights"]


def sections(text: str, to: dict[str, Any]) -> bool:
    count, mark = 0, to["section_spliter"].strip()
    for after in text.split(mark)[1:]:
        rest = after[1:] if after[:1].isspace() else after
        count += rest[:1].isdigit()
    return count >= to["num_sections"]


def is_json(text: str, _to: dict[str, Any]) -> bool:
    bare = text.strip()
    if bare.startswith("```") and bare.endswith("```") and len(bare) >= 6:
        bare = bare[3:-3]
        bare = bare[4:] if bare[:4].lower() == "json" else bare
    try:
        json.loads(bare)
    except json.JSONDecodeError:
        return False
    return True


def title(text: str, _to: dict[str, Any]) -> bool:
    for line in text.split("\n"):
        pieces = line.split("<<")
        for number in range(1, len(pieces)):
            rest = "<<".join(pieces[number:])
            if ">>" in rest and rest.partition(">>")[0].strip(" <>"):
                return True
    return False


def two_responses(text: str, _to: dict[str, Any]) -> bool:
    parts = stars(text, "******")
    return len(parts) == 2 and "" not in parts and len(set(parts)) == 2


def ends(text: str, to: dict[str, Any]) -> bool:
    bare = text.strip()
    while bare and bare[0] == '"':
        bare = bare[1:]
    while bare and bare[-1] == '"':
        bare = bare[:-1]
    phrase = to["end_phrase"].strip().casefold()
    return bare.rstrip().casefold()[-len(phrase) :] == phrase


def cased(text: str, other: str) -> bool:
    """Some letter has a case, and none is of the other one."""
    letters = [letter for letter in text if letter.upper() != letter.lower()]
    return bool(letters) and not any(getattr(letter, other)() for letter in letters)


def capitals(text: str, to: dict[str, Any]) -> bool:
    count = sum(1 for word in words(text, "'’-") if cased(word, "islower"))
    return enough(count, to["capital_frequency"], to["capital_relation"])


OPINIONS = {
    "keywords:existence": lambda text, to: not [word for word in to["keywords"] if not occurrences(text, word)],
    "keywords:frequency": lambda text, to: enough(occurrences(text, to["keyword"]), to["frequency"], to["relation"]),
    "keywords:forbidden_words": forbidden,
    "keywords:letter_frequency": lambda text, to: enough(
        sum(letter.casefold() == to["letter"].casefold() for letter in text), to["let_frequency"], to["let_relation"]
    ),
    "length_constraints:number_sentences": lambda text, to: enough(
        sentences(text), to["num_sentences"], to["relation"]
    ),
    "length_constraints:number_words": lambda text, to: enough(len(words(text)), to["num_words"], to["relation"]),
    "length_constraints:number_paragraphs": paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph,
    "detectable_content:number_placeholders": placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": bullets,
    "detectable_format:constrained_response": lambda text, _to: bool(re.search(r"My answer is (yes|no|maybe)\.", text)),
    "detectable_format:number_highlighted_sections": highlights,
    "detectable_format:multiple_sections": sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": lambda text, to: (
        text.strip().casefold()[: len(to["prompt_to_repeat"].strip())] == to["prompt_to_repeat"].strip().casefold()
    ),
    "startend:end_checker": ends,
    "startend:quotation": lambda text, _to: re.fullmatch(r'\s*"(.*)"\s*', text, re.DOTALL) is not None,
    "change_case:capital_word_frequency": capitals,
    "change_case:english_capital": lambda text, _to: cased(text, "islower"),
    "change_case:english_lowercase": lambda text, _to: cased(text, "isupper"),
    "punctuation:no_comma": lambda text, _to: set(text).isdisjoint({","}),
}
