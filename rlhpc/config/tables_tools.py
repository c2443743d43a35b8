"""[mcp.NAME]: a server of tools for the policy, by the Model Context Protocol; see tables.py.  Loads without torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from rlhpc.config.setting import (
    PROCESSES,
    SECONDS,
    Duration,
    Faults,
    Keys,
    Positive,
    Section,
    Usual,
    rule,
)
from rlhpc.config.tables import AGENT
from rlhpc.config.tables_services import LIBRARIES

if TYPE_CHECKING:
    from rlhpc.config.rules import Config


def _well_named(prefix: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]*", prefix):
        raise ValueError(f"{prefix!r} is in no name of a tool; legal: letters, digits, _ and -")
    return prefix


class McpConfig(Section):
    """[mcp.NAME]: a server whose tools the environment "tools" offers to the policy, beside environment.tools."""

    command: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """A program and its arguments, which reward services start, and talk to over its standard input and output."""
    url: str = ""
    """Instead: the address of a server that runs already, "http://node7:8000/mcp" (streamable HTTP)."""
    variables: dict[str, str] = Field(default={})
    """Environment variables of the command.  It has few others: PATH, LD_LIBRARY_PATH, HOME, USER, LOGNAME, SHELL,
    TERM."""
    pass_variables: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of variables of the reward service that the command gets, such as that of an API key."""
    header_variables: dict[str, str] = Field(default={})
    """HTTP headers of requests to the url: { Authorization = "FILES_TOKEN" } sends the value of this environment
    variable of the reward service. Never put keys in run files."""
    tools: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tools of the server that the policy gets, by the server's names; default: all that it lists."""
    prefix: Annotated[str, AfterValidator(_well_named)] = ""
    """Put before the names of its tools, where those of two servers are the same."""
    session: Literal["dialogue", "worker"] = "dialogue"
    """Who has a session, and a process of the command: each dialogue that calls a tool, until it ends; or each worker
    of a reward service, for all its dialogues, which suits tools without state."""
    max_sessions: Annotated[Positive, Usual(1, 1024, PROCESSES)] = 64
    """Most sessions of dialogues in a worker; more dialogues than these are played again, each at its next turn."""
    timeout_s: Annotated[Duration, Usual(0.1, 3600, SECONDS)] = 4.0
    """A call that takes longer is an error for the policy, if the server still says which tools it has within as long
    again; else a verifier error."""

    @rule
    def there_is_one_server(self, config: Config, key: Keys) -> Faults:
        """`command`, `url`: one of them, and with it only its own keys; no API key in the URL."""
        if bool(self.command) == bool(self.url):
            yield f"{key.command} with {key}.url={'…' if self.url else repr('')}; legal: one of them"
            return
        idle = ("header_variables",) if self.command else ("variables", "pass_variables")
        for name in idle:
            if getattr(self, name):
                has, other = ("command", "url") if self.command else ("url", "command")
                yield f"{key}.{name} is for {key}.{other}, and there is {key}.{has}; legal: leave it out"
        if self.url and not re.fullmatch(r"https?://[^/\s@?#]+(/[^\s@?#]*)?", self.url):
            said = "…" if re.search("[@?]", self.url) else repr(self.url)  # there may be a key in it
            yield f"{key}.url={said}; legal: http://HOST:PORT/mcp or https://…, without a key in it"

    @rule
    def somebody_calls_its_tools(self, config: Config, key: Keys) -> Faults:
        """Some dataset has `data.environment` = `"tools"`, or a class of yours, which may be made of it."""
        named = {dataset.environment for dataset in config.data} - {"", AGENT, *LIBRARIES}
        if not named:
            yield f'{key} has no effect: its tools are for data.environment="tools"; legal: leave it out'

    @rule
    def a_call_ends_before_its_turn(self, config: Config, key: Keys) -> Faults:
        """`timeout_s`: twice it is below `rewards.timeout_s`, or `task_timeout_s` of the task; otherwise a slow call
        would cost its worker.
        """
        for task in config.data_tasks:
            limit_s = config.rewards.timeout_of(task)
            if 2 * self.timeout_s >= limit_s:
                yield (
                    f"{key.timeout_s}: twice that is not below the {limit_s:g} s that {task!r} has (rewards.timeout_s, "
                    "rewards.task_timeout_s): a slow call would cost its worker, and the group"
                )
