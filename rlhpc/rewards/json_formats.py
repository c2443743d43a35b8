"""The formats of JSON Schema, checked alike on every machine.

Input: a text.  Output: whether it has the format.  jsonschema checks a format only where the package for it happens to
be installed; these need none.  By RFC 3339 (dates, times, durations), 3986 and 3987 (URI, IRI), 6570 (templates), 6901
(pointers), 5321 and 6531 (mail), 1123 and IDNA (hosts).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from datetime import date

from jsonschema import FormatChecker

_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_TIME = re.compile(
    r"([01]\d|2[0-3]):([0-5]\d):([0-5]\d|60)(?:\.\d+)?(?:[Zz]|([+-])([01]\d|2[0-3]):([0-5]\d))", re.ASCII
)
_OF_DAYS = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_OF_HOURS = r"(?:T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))"
_DURATION = re.compile(rf"P(?:\d+W|{_OF_DAYS}{_OF_HOURS}?|{_OF_HOURS})", re.ASCII)
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)*")
_RELATIVE_POINTER = re.compile(r"(?:0|[1-9][0-9]*)(?:[+-][1-9][0-9]*)?(?:#|(?:/(?:[^~/]|~[01])*)*)")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.IGNORECASE | re.ASCII)
_OTHER_DOTS = re.compile("[\u3002\uff0e\uff61]")
_LONGEST_HOST = 253
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~{more}-]+"
_QUOTED = r'"(?:[ !#-\[\]-~{more}]|\\[ -~])*"'
_BEYOND_ASCII = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 15)
)
_IDENTIFIER = re.compile(r"(?:([^:/?#]+):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)  # RFC 3986, B
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_VARIABLE = r"(?:\w|%[0-9A-Fa-f]{2})(?:\.?(?:\w|%[0-9A-Fa-f]{2}))*(?::[1-9]\d{0,3}|\*)?"
_TEMPLATE = re.compile(
    rf"(?:[^\x00-\x20\"%<>\\^`{{|}}\x7f]|%[0-9A-Fa-f]{{2}}|{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*}})*", re.ASCII
)


def _is_date(text: str) -> bool:
    match = _DATE.fullmatch(text)
    try:
        return match is not None and bool(date(*map(int, match.groups())))
    except ValueError:
        return False


def _is_time(text: str) -> bool:
    """With its offset; a leap second is the last one of a day in UTC."""
    if (match := _TIME.fullmatch(text)) is None:
        return False
    hours, minutes, seconds, sign, ahead_hours, ahead_minutes = match.groups()
    ahead = (int(ahead_hours) * 60 + int(ahead_minutes)) * (-1 if sign == "-" else 1) if sign else 0
    return seconds != "60" or (int(hours) * 60 + int(minutes) - ahead) % 1440 == 1439


def _is_date_time(text: str) -> bool:
    return text[10:11] in ("T", "t") and _is_date(text[:10]) and _is_time(text[11:])


def _is_draft_3_time(text: str) -> bool:
    return re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d", text, re.ASCII) is not None


def _is_host(text: str) -> bool:
    return len(text) <= _LONGEST_HOST and all(map(_is_label, text.split(".")))


def _is_label(label: str) -> bool:
    if _LABEL.fullmatch(label) is None:
        return False
    if label[2:4] != "--":
        return True
    try:  # of the names with hyphens there only those that stand for others are legal
        return label[:4].lower() == "xn--" and label.encode().decode("idna").encode("idna").decode() == label.lower()
    except UnicodeError:
        return False


def _is_international_host(text: str) -> bool:
    try:
        return _is_host(_OTHER_DOTS.sub(".", text).encode("idna").decode())
    except UnicodeError:
        return False


def _mail(more: str, is_host: Callable[[str], bool]) -> Callable[[str], bool]:
    atom, quoted = _ATOM.replace("{more}", more), _QUOTED.replace("{more}", more)
    local = re.compile(rf"(?:{atom}(?:\.{atom})*|{quoted})")

    def is_mail(text: str) -> bool:
        name, at, host = text.rpartition("@")
        if not at or local.fullmatch(name) is None:
            return False
        if host.startswith("[") and host.endswith("]"):
            inner = host[1:-1]
            return _is_ipv6(inner[5:]) if inner[:5].lower() == "ipv6:" else _is_ipv4(inner)
        return is_host(host)

    return is_mail


def _is_ipv4(text: str) -> bool:
    try:
        return bool(ipaddress.IPv4Address(text))
    except ValueError:
        return False


def _is_ipv6(text: str) -> bool:
    try:
        return "%" not in text and bool(ipaddress.IPv6Address(text) or True)
    except ValueError:
        return False


def _is_regex(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _identifier(more: str, *, may_be_relative: bool) -> Callable[[str], bool]:
    """More: characters beyond those of a URI."""
    part = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:{more}\-%s]|%%[0-9A-Fa-f]{{2}})*"
    path_like, query_like, user_like = re.compile(part % "@/"), re.compile(part % "@/?"), re.compile(part % "")

    def is_identifier(text: str) -> bool:
        parts = _IDENTIFIER.fullmatch(text)
        assert parts is not None  # it fits every text
        scheme, authority, path, query, fragment = parts.groups()
        if not (may_be_relative if scheme is None else _SCHEME.fullmatch(scheme)):
            return False
        if not path_like.fullmatch(path) or not all(query_like.fullmatch(each or "") for each in (query, fragment)):
            return False
        user, _, place = (authority or "").rpartition("@")
        is_address = place.startswith("[")
        host, _, port = place[1:].partition("]") if is_address else place.partition(":")
        if not user_like.fullmatch(user) or not re.fullmatch(r":[0-9]*|" if is_address else r"[0-9]*", port):
            return False
        return _is_address(host) if is_address else user_like.fullmatch(host) is not None

    return is_identifier


def _is_address(text: str) -> bool:
    return _is_ipv6(text) or re.fullmatch(r"[vV][0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:-]+", text) is not None


def _matches(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda text: pattern.fullmatch(text) is not None


FORMATS: dict[str, Callable[[str], bool]] = {
    "date": _is_date,
    "time": _is_time,
    "date-time": _is_date_time,
    "duration": _matches(_DURATION),
    "email": _mail("", _is_host),
    "idn-email": _mail(_BEYOND_ASCII, _is_international_host),
    "hostname": _is_host,
    "host-name": _is_host,
    "idn-hostname": _is_international_host,
    "ipv4": _is_ipv4,
    "ip-address": _is_ipv4,
    "ipv6": _is_ipv6,
    "uri": _identifier("", may_be_relative=False),
    "uri-reference": _identifier("", may_be_relative=True),
    "iri": _identifier(_BEYOND_ASCII, may_be_relative=False),
    "iri-reference": _identifier(_BEYOND_ASCII, may_be_relative=True),
    "uri-template": _matches(_TEMPLATE),
    "uuid": _matches(_UUID),
    "json-pointer": _matches(_POINTER),
    "relative-json-pointer": _matches(_RELATIVE_POINTER),
    "regex": _is_regex,
}
_DRAFT_3 = {"time": _is_draft_3_time}


def format_checker(draft: str) -> FormatChecker:
    """The checker of a draft, "Draft3Validator" or another."""
    return _checker(FORMATS | (_DRAFT_3 if draft == "Draft3Validator" else {}))


def pattern_checker() -> FormatChecker:
    """The checker of schemas themselves, whose patterns must be regular expressions."""
    return _checker({"regex": _is_regex})


def _checker(formats: dict[str, Callable[[str], bool]]) -> FormatChecker:
    checker = FormatChecker(formats=())
    for name, has_format in formats.items():
        checker.checks(name)(lambda value, has_format=has_format: not isinstance(value, str) or has_format(value))
    return checker
