"""The result of a check of a site: key and value of the site file, a verdict, what is legal or what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    key: str  # of the site file, if it has one
    value: str
    verdict: Verdict
    text: str
    remedy: str = ""  # what to do; of a failure "legal: …"

    @property
    def component(self) -> str:
        """Section of the site file that the key belongs to."""
        return self.key.partition(".")[0]

    @property
    def line(self) -> str:
        """All of it, for an error message."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.key}={self.value!r}: {self.text}{remedy}"
