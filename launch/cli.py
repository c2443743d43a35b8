"""The command line: ``rlhpc run | submit | status | stop | …``; `rlhpc --help` lists all commands.

Commands import what they need when they are called: ``rlhpc --help`` and ``rlhpc check`` do not load torch.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from launch.commands.arguments import command_parser, function_of, refuse_words, run_layout, similar_command
from launch.common.text import escaped, print_whatever_happens, refused_by_the_system, say_or_lose
from launch.supervisor.processes import REQUESTS, StopSignal
from rlhpc.base.processes import name_nameless_user
from rlhpc.protocol.errors import EXIT_CONFIG, EXIT_INTERRUPTED, RlhpcError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every error is a line on stderr with exit status 2, Ctrl-C gives 130, SIGTERM 143."""
    print_whatever_happens()
    name_nameless_user()
    parser = command_parser()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if typed and (meant := similar_command(typed[0])):
        parser.error(f"{typed[0]!r}: no such command (did you mean {meant}?); `rlhpc --help` lists all")
    options, rest = parser.parse_known_args(typed)
    options.typed = typed
    # argparse takes no more positionals after an option: `run RUN.toml --fresh run.seed=1`
    place = next((name for name in ("overrides", "words") if name in options), None)
    if any(word.startswith("-") or place is None or (place == "overrides" and "=" not in word) for word in rest):
        refuse_words(parser, options.command, rest)
    if place is not None:
        setattr(options, place, [*getattr(options, place), *rest])
    try:
        if "run_dir" in options:
            options.layout = run_layout(options.run_dir)
        status: int = resolve_name(function_of(options.command))(options)
        sys.stdout.flush()
    except RlhpcError as error:
        say_or_lose(f"rlhpc: {escaped(str(error))}")
        return EXIT_CONFIG
    except (OSError, UnicodeEncodeError) as error:  # no permission, a full disk, a name that cannot be printed
        return refused_by_the_system(error)
    except StopSignal as stop:
        say_or_lose(f"rlhpc: {stop}")
        return stop.status
    except KeyboardInterrupt as interrupt:
        if interrupt.args:  # a line about the work so far
            say_or_lose(f"rlhpc: {escaped(str(interrupt))}")
        return EXIT_INTERRUPTED
    return status


def command() -> int:
    """Entry point of the process: main(), after which signals cannot change the exit status."""
    status = main()
    if sys.argv[1:2] in (["run"], ["sft"]):
        signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    return status


if __name__ == "__main__":
    sys.exit(command())
