"""Make README.md the description of the package; all else stands in pyproject.toml.

A package index shows the page without the repository around it: `[text](docs/page.md)` becomes `text (docs/page.md)`,
as the source distribution has it, and pictures are left out.
"""

import re
from pathlib import Path

from setuptools import setup

_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?://)[^)]*\)\n\n?", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?://)([^)]*)\)")


def _alone(page: str) -> str:
    return _LINK.sub(lambda link: link[1] if link[1] == link[2] else f"{link[1]} ({link[2]})", _PICTURE.sub("", page))


setup(
    long_description=_alone(Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
