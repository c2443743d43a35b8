"""Remove from a text what others should not read: secrets, user names, home directories.  Pure except `Private.here`.

Input: text and Private.  Output: text.  Guarantees: no value of a secret variable, nothing that looks like a key or a
token, no user name and no home directory is left.  Names of nodes, partitions and accounts are not removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhpc.own_user import own_home, own_name

REMOVED = "(removed)"
_WORDS = (
    r"token(?!iz)|secret|passw|passphrase|credential|cookie|auth(?!ors?\b)|api[_-]?key|access[_-]?key|_key|signature"
)
_SECRET_NAME = rf"[\w.-]*(?:{_WORDS})[\w.-]*"
_SECRET = re.compile(_SECRET_NAME, re.IGNORECASE)
_VALUE = r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|\[[^\]\n]*\]|[^\s,;}\]]+)"
# name = value, name: value, "name": "value", --name value
_ASSIGNED = re.compile(
    rf"(?P<name>(?<![\w.-]){_SECRET_NAME}(?:[\"']?\s*[=:]\s*|\s+(?=[\"']))|--{_SECRET_NAME}\s+){_VALUE}",
    re.IGNORECASE,
)
_COUNTED = re.compile(r"tokens|token_(?:budget|count|ids?)\b", re.IGNORECASE)  # the other kind of token
_NUMBER = re.compile(r"-?[\d_.]+|\[.*|null|none|true|false", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abpr]-|AKIA|ya29\.|pypi-)[\w-]{8,}"  # as their issuers begin them
    r"|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]+"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b[0-9a-fA-F]{32,}\b|(?<![\w/+.-])(?=[\w+]*\d)(?=[\w+]*[A-Z])[A-Za-z0-9+]{32,}={0,2}",  # hexadecimal, base64
    re.DOTALL,
)
_USER_INFO = re.compile(r"(?<=//)[^\s/]+@")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_ANY_HOME = re.compile(r"(?<![\w.~])/(?:home|users|Users|u)/[^\s/:\"',;]+")


@dataclass(frozen=True, slots=True)
class Private:
    """What belongs to the one who runs the command."""

    names: tuple[str, ...]
    homes: tuple[str, ...]
    values: tuple[str, ...]  # of variables whose names tell that they are secret

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> Private:
        """Of this process."""
        names = {own_name(), *(environment.get(name, "") for name in ("USER", "LOGNAME", "SLURM_JOB_USER"))}
        homes = {str(own_home({})), str(own_home(environment))}
        homes |= {str(Path(home).resolve()) for home in homes if home}
        return cls(tuple(names), tuple(homes), tuple(v for k, v in environment.items() if is_secret_name(k)))


def is_secret_name(name: str) -> bool:
    """True if a variable of this name holds what nobody else should read."""
    return _SECRET.fullmatch(name) is not None


def redact(text: str, private: Private) -> str:
    """The text without secrets, names and homes; ~ stands for the home directory, USER for the name."""
    for value in sorted(filter(lambda value: len(value) >= 4, private.values), key=len, reverse=True):
        text = text.replace(value, REMOVED)
    text = _SHAPES.sub(REMOVED, text)
    text = _BEARER.sub(rf"\1 {REMOVED}", text)
    text = _ASSIGNED.sub(_without_value, text)
    text = _EMAIL.sub(REMOVED, _USER_INFO.sub(f"{REMOVED}@", text))
    for home in sorted(filter(lambda home: len(home) > 1, private.homes), key=len, reverse=True):
        text = re.sub(rf"{re.escape(home.rstrip('/'))}(?![\w-])", "~", text)
    text = _ANY_HOME.sub("/HOME", text)
    for name in sorted(filter(None, private.names), key=len, reverse=True):
        # In paths too (/scratch/ada/runs), but not within another word.
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "USER", text)
    return text


def _without_value(found: re.Match[str]) -> str:
    is_setting = _COUNTED.search(found["name"]) is not None and _NUMBER.fullmatch(found["value"]) is not None
    return found[0] if is_setting else f"{found['name']}{REMOVED}"
