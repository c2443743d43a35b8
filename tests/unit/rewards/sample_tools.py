"""Tools of a user, also such that fail; named by tests as "sample_tools:weather" and so on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Optional

import numpy as np

from rlhpc.environments.tools import ToolEnvironment

DEGREES = {"Oslo": 4, "Rome": 21}


async def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> list[str]:
    """Tell the temperatures of the next days.

    Two cities are known.

    Args:
        city: Name of the city, in
            English
        days: How many days
        unit: Celsius or Fahrenheit

    Returns:
        One text a day
    """
    await asyncio.sleep(0)
    if city not in DEGREES:
        raise ValueError(f"no such city: {city}")
    return [f"{DEGREES[city]} °{unit}"] * days


def many(
    a: int | float,
    b: list[dict[str, int]],
    c: Optional[float] = None,  # noqa: UP045 - as people write it
    d: tuple[int, str] = (1, "a"),
    e: Any = 3,
    f: dict | None = None,
    g: bool = False,
    *,
    h: str = "x",
    i: Annotated[int, "counted"] = 3,
    j: Literal["x", 3] = 3,
) -> None:
    """Take values of many types.

    Args:
        a: A
        b: B
        c: C
        d: D
        e: E
        f: F
        g: G
        h: H (choices: ["x", "y"])
        i: I
        j: J
    """


def nothing() -> str:
    """Take nothing."""
    return "so be it"


def spoken(what: str) -> Any:
    """Do what it is told.

    Args:
        what: What to do
    """
    if what == "hang":
        time.sleep(600)
    if what == "raise":
        raise KeyError("Paris")
    results: Mapping[str, Any] = {
        "none": None,
        "number": 1.5,
        "numpy": np.arange(2),
        "è": {"è": [True]},
        "long": "x" * 99,
    }
    return results.get(what, object())


class Notes(ToolEnvironment):
    """Remembers what it was told in this dialogue; has a tool that nothing describes."""

    def __init__(self, settings):
        super().__init__(settings)
        self.kept: list[str] = []
        self.tools["spoken"] = self.keep
        self.tools["shout"] = str.upper

    def keep(self, what: str) -> list[str]:
        self.kept.append(what)
        return self.kept
