"""Start one role: ``python -m rlhpc.roles ROLE --run-dir DIR``.  Heavy imports happen after the arguments are read."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from rlhpc.base.files import leave_deleted_directory
from rlhpc.base.host_address import refuse_foreign_network, tell_gloo
from rlhpc.base.native import loading_libraries
from rlhpc.base.processes import name_nameless_user
from rlhpc.protocol.errors import EXIT_CONFIG, ConfigError
from rlhpc.roles.lifecycle import RoleContext, leave_at_once, parse_role, run_role


def main() -> NoReturn:
    """Read the role from the arguments, load that role alone, run it."""
    with _dying_of_interrupts():
        context, run = _loaded()
    leave_at_once(run_role(context, run))


@contextmanager
def _dying_of_interrupts() -> Iterator[None]:
    """Let SIGINT end the process without a traceback while it loads."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # blocked by its role task
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _loaded() -> tuple[RoleContext, Callable[[RoleContext], None]]:
    try:
        context = parse_role(sys.argv[1:])
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        leave_at_once(EXIT_CONFIG)
    leave_deleted_directory(context.layout.root)  # `git checkout` of another branch deletes directories
    name_nameless_user()
    tell_gloo()
    if context.role in ("trainer", "generator", "service"):
        _refuse_foreign_network(context)
    # A role loads only what it needs itself: neither controller nor reward service waits for torch and vLLM.
    with loading_libraries():
        match context.role:
            case "controller" if context.config.is_supervised:
                from rlhpc.roles.controller.supervised import run
            case "controller":
                from rlhpc.roles.controller.controller import run
            case "generator":
                from rlhpc.roles.generator.generator import run
            case "reward":
                from rlhpc.roles.reward_service import run
            case "service":
                from rlhpc.roles.service.service import run
            case _:
                from rlhpc.roles.trainer.trainer import run
    return context, run


def _refuse_foreign_network(context: RoleContext) -> None:
    has_cuda, has_vllm = context.config.trainer.device == "cuda", context.config.generation.engine == "vllm"
    try:
        refuse_foreign_network(has_cuda=has_cuda, has_vllm=has_vllm and context.role != "trainer")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        leave_at_once(EXIT_CONFIG)


if __name__ == "__main__":  # engine workers are spawned: they import this module again
    main()
