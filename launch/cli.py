"""The command line: ``rlhpc run | submit | status | stop | …``; `rlhpc --help` lists all commands.

Commands import what they need when they are called: ``rlhpc --help`` and ``rlhpc check`` do not load torch.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from launch.commands.arguments import (
    command_parser,
    continued,
    function_of,
    hint_for,
    refuse_resume_point,
    refuse_without_predict,
    resume_point,
    similar_command,
)
from launch.common.text import (
    escaped,
    optional_module,
    print_or_lose,
    print_whatever_happens,
    refused_by_the_system,
    say_or_lose,
)
from launch.supervisor.processes import REQUESTS, StopSignal
from rlhpc.base.patience import seen
from rlhpc.base.processes import name_nameless_user
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_CONFIG, EXIT_INTERRUPTED, ConfigError, RlhpcError, RunDirectoryError

if TYPE_CHECKING:
    from rlhpc.config.rules import Config


# ----------------------------------------------------------------------------------------------------------- completion
#
# `rlhpc completion SHELL`: a script that completes commands, options and paths.
#
# Output: the script, for bash, zsh or fish, made by shtab from the parser of the command line.  It is static: a shell
# that completes starts no Python, which would take a tenth of a second and more for every press of a key.


_DIRECTORIES = ("RUN_DIR", "DIR", "DIRECTORY", "OUT", "MODEL|RUN_DIR", "RUN_DIR|DIR", "FIRST", "SECOND")  # metavars


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """shell: "bash", "zsh" or "fish".  Raises ConfigError: shtab is not installed."""
    shtab = optional_module("shtab", "completion")
    for action in _actions(parser):
        metavar = str(action.metavar or "")
        if metavar in _DIRECTORIES:
            action.complete = shtab.DIRECTORY
        elif action.type is Path or ".toml" in metavar or "FILE" in metavar:
            action.complete = shtab.FILE
    return str(shtab.complete(parser, shell=shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[Any]:
    """Actions of a parser and of all below it; those that take nothing are left out.  `complete` is shtab's own."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
        elif action.nargs != 0:
            yield action


# ------------------------------------------------------------------------------------------------------------------ cli


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
        parser.error(f"unrecognised arguments: {' '.join(rest)}{hint_for(rest)}")
    if place is not None:
        setattr(options, place, [*getattr(options, place), *rest])
    try:
        act = _ACTIONS.get(options.command) or resolve_name(function_of(options.command))
        status: int = act(options)
        sys.stdout.flush()
    except RlhpcError as error:
        say_or_lose(f"rlhpc: {escaped(str(error))}")
        return EXIT_CONFIG
    except (OSError, UnicodeEncodeError) as error:  # no permission, a full disk, a name that cannot be said
        return refused_by_the_system(error)
    except StopSignal as stop:
        say_or_lose(f"rlhpc: {stop}")
        return stop.status
    except KeyboardInterrupt as interrupt:
        if interrupt.args:  # says what has been done so far
            say_or_lose(f"rlhpc: {escaped(str(interrupt))}")
        return EXIT_INTERRUPTED
    return status


def command() -> int:
    """Run one command as a process of its own: main, after which a signal cannot change the status of a run."""
    status = main()
    if sys.argv[1:2] == ["run"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    return status


def _settings(options: argparse.Namespace, run_file: Path | None = None) -> Config:
    from rlhpc.config.file import load_config  # takes most of the time in which Ctrl-C could not be handled yet

    return load_config(run_file or options.run_file, options.overrides)


def _cluster(options: argparse.Namespace) -> int:
    from launch.private_slurm import cluster

    actions = {"up": cluster.up, "status": cluster.status, "down": cluster.down}
    return actions[options.action](options)


def _check(options: argparse.Namespace) -> int:
    if options.run_file.is_dir():
        from launch.verify.audit import check_run_directory

        return check_run_directory(options)
    if not options.run_file.exists() and options.run_file.suffix != ".toml":
        _refuse_missing(options.run_file, "file or directory")
    from launch.commands.check import check_run_file

    return check_run_file(options)


def _audit(options: argparse.Namespace) -> int:
    from launch.verify.audit import report_audit

    return report_audit(_layout(options), is_quick=options.quick, as_json=options.json)


def _plan(options: argparse.Namespace) -> int:
    if not options.predict:
        refuse_without_predict(options)
        return _show_jobs(options)
    from launch.commands.predict import predict
    from launch.plan.site_file import load_site

    config, site = _settings(options), load_site(options.site_file)
    print(predict(config, site, options))
    return 0


def _show_jobs(options: argparse.Namespace) -> int:
    from launch.commands.submit import jobs_in_words
    from launch.plan.site_file import load_site

    print(jobs_in_words(_settings(options), load_site(options.site_file)))
    return 0


def _run(options: argparse.Namespace) -> int:
    from launch.commands.run import run_locally

    resume_from, config = resume_point(options), _settings(options)
    how = {} if options.max_retries is None else {"max_retries": options.max_retries}
    again = continued(options.typed)
    how |= {"resume": options.resume, "fresh": options.fresh, "is_quiet": options.quiet, "again": again}
    status = run_locally(config, resume_from=resume_from, **how)
    if not options.quiet:
        from launch.run_files.run_state import last_words

        layout = RunLayout(config.run_directory)
        unseen = [f"{layout.root}: cannot be read at the moment; `rlhpc status` says later how it ended"]
        for line in seen(lambda: last_words(layout, f"`{shlex.join(again)}`", status), unseen):
            print_or_lose(line)
    return status


def _submit(options: argparse.Namespace) -> int:
    from launch.commands.submit import dependency, submit_run

    resume_from = resume_point(options)
    if options.seeds is not None or options.sweep:
        from launch.commands.sweep import submit_sweep

        refuse_resume_point(options)
        return submit_sweep(options, _tell)
    if options.dry_run:
        dependency(options.after)
        return _show_jobs(options)
    config = _settings(options)
    how = {"resume": options.resume, "fresh": options.fresh}
    layout = submit_run(config, options.site_file, **how, after=options.after, tell=_tell, resume_from=resume_from)
    return _wait(layout) if options.wait else 0


def _resume(options: argparse.Namespace) -> int:
    from launch.commands.submit import resume_run

    where = resume_point(options)
    layout = resume_run(_layout(options), options.words, after=options.after, tell=_tell, resume_from=where)
    return _wait(layout) if options.wait else 0


def _wait(layout: RunLayout) -> int:
    from launch.view.status import wait_for_run

    return wait_for_run(layout)


def _status(options: argparse.Namespace) -> int:
    from launch.view.status import render_status

    print(render_status(_layout(options), as_json=options.json))
    return 0


def _stop(options: argparse.Namespace) -> int:
    from launch.commands.stop import stop_run

    return stop_run(_layout(options), now=options.now, tell=_tell)


def _scale(options: argparse.Namespace) -> int:
    from launch.commands.scale import Addition, scale_run

    if len(options.words) > 1:
        raise ConfigError(f"{options.words[1]!r}: at most one site file; other arguments are options (`--help`)")
    how = Addition(Path(options.words[0]) if options.words else None, options.partition, options.time)
    scale_run(_layout(options), options.generators, how, dry_run=options.dry_run, tell=_tell)
    return 0


def _logs(options: argparse.Namespace) -> int:
    from launch.commands.logs import show_logs

    role, *more = options.words or [None]
    if more:
        raise ConfigError(f"{more[0]!r}: at most one role; `rlhpc logs RUN_DIR` shows all")
    return show_logs(_layout(options), role, options.follow)


def _report(options: argparse.Namespace) -> int:
    from launch.commands.show import report_run

    return report_run(_layout(options), options.html)


def _metrics(options: argparse.Namespace) -> int:
    from launch.commands.show import show_metrics

    return show_metrics(_layout(options), options)


def _doctor(options: argparse.Namespace) -> int:
    from launch.doctor.command import doctor

    files = [word for word in options.words if "=" not in word]
    options.overrides = [word for word in options.words if "=" in word]
    options.run_file = Path(files[0]) if files else None
    if len(files) > 1:
        raise ConfigError(f"{files[1]!r}: legal: at most one run file, and overrides (key=value)")
    if options.overrides and not files:
        raise ConfigError(f"{options.overrides[0]!r}: an override needs a run file, and none is given")
    return doctor(options)


def _layout(options: argparse.Namespace) -> RunLayout:
    from launch.common.text import without_dots

    layout = RunLayout(without_dots(options.run_dir))
    if not layout.is_run:
        _refuse_missing(options.run_dir, "directory")
    return layout


def _refuse_missing(run: Path, what: str) -> None:
    """Raises RunDirectoryError: there is nothing, or the run of this name is below runs/."""
    usual = RunLayout(Path("runs") / run)
    if usual.is_run:
        raise RunDirectoryError(f"{run}: not a run directory (did you mean {usual.root}?)")
    if not run.exists():
        raise RunDirectoryError(f"{run}: no such {what}; `rlhpc list` shows your runs")


def _tell(line: str) -> None:
    print_or_lose(line)  # whoever has closed the pipe does not end a submission in the middle


def _export(options: argparse.Namespace) -> int:
    from launch.commands.export import export_run

    print(export_run(_layout(options), options.out, options.step, is_average=options.ema, dtype=options.dtype))
    return 0


def _schema(options: argparse.Namespace) -> int:
    if options.kind == "metrics":
        from rlhpc.metrics.names import table_markdown

        print(table_markdown())
        return 0
    from launch.commands.schema import schema_of

    print(schema_of(options.kind))
    return 0


def _completion(options: argparse.Namespace) -> int:

    print(completion_script(command_parser(), options.shell))
    return 0


def _recipes(options: argparse.Namespace) -> int:
    from launch.commands.recipes import copy_recipe, recipe_table
    from launch.common.text import quoted

    if options.action is None:
        print(recipe_table())
        return 0
    copy = copy_recipe(options.name, options.directory)
    print(
        f"{copy}: put your paths into model.path and data.path; "
        f"`rlhpc check {quoted(copy)} --site SITE.toml` comes next"
    )
    return 0


def _demo(options: argparse.Namespace) -> int:
    if options.model_only is not None or options.like is not None:
        return _demo_model(options)
    from launch.demo.run import RUN_FILE, run_demo, say

    run_file = options.run_file or RUN_FILE
    if not options.slurm:
        from launch.commands.run import run_locally
        from launch.doctor.gpus import gpus_here
        from launch.plan.gpu_map import map_gpus

        map_gpus(_settings(options, run_file), gpus_here(os.environ))  # refused before the warm start
        return run_demo(lambda config: run_locally(config, fresh=True), run_file, options.overrides)
    from launch.demo import run as slurm

    slurm.refuse_before_the_work(options.time)
    overrides = [*slurm.OVERRIDES, *options.overrides]
    return run_demo(lambda config: slurm.run_on_slurm(config, options.time, say), run_file, overrides)


def _demo_model(options: argparse.Namespace) -> int:
    """Only the model of a demo: a stand-in for one's own run file."""
    if options.model_only is None:
        raise ConfigError(f"--like {options.like}: has a meaning only with --model-only DIR")
    if options.slurm or options.run_file or options.overrides:
        raise ConfigError("--model-only: writes a model and runs nothing; legal beside it: --like")
    from launch.common.text import quoted
    from launch.demo.stand_in import make_stand_in

    num_parameters = make_stand_in(options.model_only, options.like)
    place = quoted(options.model_only)
    print(f"{options.model_only}: {num_parameters:,} random parameters: no answer will be right.  With your run file:")
    print(f"  rlhpc check RUN.toml model.path={place}")
    more = "model.dtype=float32 run.name=try run.num_steps=3 admission.active_sampling=false"
    print(f"  rlhpc run RUN.toml model.path={place} {more}")
    return 0


# What arguments.py names no function of.
_ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "check": _check,
    "audit": _audit,
    "plan": _plan,
    "submit": _submit,
    "resume": _resume,
    "status": _status,
    "stop": _stop,
    "scale": _scale,
    "logs": _logs,
    "report": _report,
    "metrics": _metrics,
    "doctor": _doctor,
    "export": _export,
    "demo": _demo,
    "schema": _schema,
    "completion": _completion,
    "recipes": _recipes,
    "cluster": _cluster,
}


if __name__ == "__main__":
    sys.exit(command())
