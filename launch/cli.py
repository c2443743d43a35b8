"""The command line: ``rlhpc run | submit | status | stop | …``; `rlhpc --help` lists all commands.

Commands import what they need when they are called: ``rlhpc --help`` and ``rlhpc check`` do not load torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.commands.arguments import (
    is_family,
    number,
    refuse_resume_point,
    resume_point,
    takes_cluster_commands,
    takes_evaluation,
    takes_evaluations,
    takes_export,
    takes_list,
    takes_overrides,
    takes_recipe,
    takes_resume_point,
    takes_run_directory,
    takes_run_file,
    takes_scale,
    takes_site_file,
    takes_submission,
    takes_waiting,
)
from rlhpc.config_file import load_config
from rlhpc.errors import ConfigError, RlhpcError
from rlhpc.exit_status import EXIT_CONFIG, EXIT_INTERRUPTED
from rlhpc.run_layout import RunLayout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every error is a line on stderr with exit status 2, Ctrl-C gives 130."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes no more positionals after an option: `run RUN.toml --fresh run.seed=1`
    place = next((name for name in ("overrides", "words") if name in options), None)
    if any(word.startswith("-") or place is None or (place == "overrides" and "=" not in word) for word in rest):
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    if place is not None:
        setattr(options, place, [*getattr(options, place), *rest])
    try:
        status: int = options.command(options)
    except RlhpcError as error:
        sys.stderr.write(f"rlhpc: {error}\n")
        return EXIT_CONFIG
    except BrokenPipeError:  # `rlhpc status … | head`
        return 0
    except OSError as error:  # no permission, a full disk
        where = f"{error.filename}: " if error.filename is not None else ""
        sys.stderr.write(f"rlhpc: {where}{error.strerror or error}\n")
        return EXIT_CONFIG
    except KeyboardInterrupt as interrupt:
        if interrupt.args:  # says what has been done so far
            sys.stderr.write(f"rlhpc: {interrupt}\n")
        return EXIT_INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlhpc", description="Asynchronous RL post-training of language models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=function)
        return sub

    run = command("run", _run, "Start a run as processes on this machine and watch it.")
    takes_run_file(run)
    takes_overrides(run)
    again = run.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="continue from the newest sound checkpoint")
    again.add_argument("--fresh", action="store_true", help="delete the run directory and start over")
    takes_resume_point(run)
    run.add_argument(
        "--max-retries",
        type=number,
        metavar="N",
        help="attempts after failed ones without a new checkpoint; default: 5",
    )
    check = command(
        "check", _check, "Validate a run file, its model and its data; or verify everything that a run has written."
    )
    check.add_argument("run_file", type=Path, metavar="RUN.toml|RUN_DIR", help="run file, or directory of a run")
    takes_overrides(check)
    check.add_argument("--json", action="store_true", help="JSON output for programs (RUN_DIR only)")
    check.add_argument("--site", type=Path, metavar="SITE.toml", help="site file: refuse what does not fit its GPUs")
    audit = command("audit", _audit, "Prove from a run's files that every prompt is in exactly one place.")
    takes_run_directory(audit)
    audit.add_argument("--quick", action="store_true", help="read neither tokens nor checksums: seconds on long runs")
    audit.add_argument("--json", action="store_true", help="JSON output for programs")
    plan = command("plan", _plan, "Print the Slurm jobs of a run and their exact scripts; submit nothing.")
    takes_run_file(plan)
    takes_site_file(plan)
    takes_overrides(plan)
    _add_run_commands(command)
    takes_export(command("export", _export, "Write the trained model as an HF checkpoint."))
    takes_evaluation(command("evaluate", _evaluate, "Sample a dataset with a model; print pass@k, with intervals."))
    takes_evaluations(
        command("compare", _compare, "Say whether one of two evaluated models is better, and how surely.")
    )
    demo = command("demo", _demo, "Warm-start a tiny model and teach it arithmetic by RL, in minutes, on CPU.")
    demo.add_argument("--run-file", type=Path, metavar="FILE", help="another run file; configs/demo_tool.toml: tools")
    demo.add_argument(
        "--slurm", action="store_true", help="as one heterogeneous job on a private Slurm on this machine"
    )
    demo.add_argument(
        "--time", default="0:30:00", metavar="T", help="time limit of the job of --slurm (default 0:30:00)"
    )
    takes_overrides(demo)
    takes_recipe(command("recipes", _recipes, "List run files that reproduce published runs; copy one."))
    takes_cluster_commands(
        command("cluster", _cluster, "Start, show or end a private Slurm in one directory, with fake GPUs; no root.")
    )
    return parser


def _add_run_commands(command: Callable[[str, object, str], argparse.ArgumentParser]) -> None:
    """The commands that submit a run, and those that take a run directory."""
    takes_submission(command("submit", _submit, "Check a run, and submit its Slurm jobs."))
    resume = command("resume", _resume, "Submit the jobs of a run again, to continue from its last checkpoint.")
    takes_run_directory(resume)
    again = "another site file, other settings; default: those of the last submit"
    resume.add_argument("words", nargs="*", default=[], metavar="SITE.toml|key=value", help=again)
    takes_resume_point(resume)
    takes_waiting(resume)
    status = command("status", _status, "Show a run: its jobs and roles, their work in progress, what they wait for.")
    takes_run_directory(status)
    status.add_argument("--json", action="store_true", help="JSON output for programs")
    takes_list(command("list", _list, "Show your runs below a directory and in the queue, one line each."))
    stop = command("stop", _stop, "Finish the step, save, and end every process and job of a run.")
    takes_run_directory(stop)
    stop.add_argument(
        "--now", action="store_true", help="do not finish the step; work since the last checkpoint is lost"
    )
    takes_scale(command("scale", _scale, "Add generators to a submitted run, or remove added ones."))
    logs = command("logs", _logs, "Show the logs of a run's processes.")
    takes_run_directory(logs)
    what = 'such as "trainer", "generator-1", "slurm" for batch logs; default: all'
    logs.add_argument("words", nargs="*", default=[], metavar="ROLE", help=what)
    logs.add_argument("-f", "--follow", action="store_true", help="print new lines until the run ends")
    doctor = command("doctor", _doctor, "Look for what would prevent runs on a site, and print remedies.")
    takes_site_file(doctor)
    which = "the run to check for, with overrides; default: a minimal one"
    doctor.add_argument("words", nargs="*", default=[], metavar="RUN.toml|key=value", help=which)
    doctor.add_argument("--quick", action="store_true", help="check from this machine only, without jobs")
    doctor.add_argument("--timeout-s", type=float, default=300.0, metavar="S", help="for the test jobs (default 300)")
    doctor.add_argument("--report", type=Path, metavar="FILE", help="write everything, without secrets, to a file")


def _cluster(options: argparse.Namespace) -> int:
    from launch.dev_cluster import commands

    actions = {"up": commands.up, "status": commands.status, "down": commands.down}
    return actions[options.action](options)


def _check(options: argparse.Namespace) -> int:
    if options.run_file.is_dir():
        from launch.commands.check_run import check_run_directory

        return check_run_directory(options)
    from launch.commands.check import check_run_file

    return check_run_file(options)


def _audit(options: argparse.Namespace) -> int:
    from launch.commands.audit import report_audit

    return report_audit(_layout(options), is_quick=options.quick, as_json=options.json)


def _plan(options: argparse.Namespace) -> int:
    from launch.plan.report import plan_report
    from launch.plan.site_file import load_site

    config, site = load_config(options.run_file, options.overrides), load_site(options.site_file)
    print(plan_report(config, site))
    if config.evaluation:
        from launch.commands.evaluate.job import EvaluationJob

        print(f"\n----- evaluation.sbatch\n{EvaluationJob.following(config, site).script.rstrip()}")
    return 0


def _run(options: argparse.Namespace) -> int:
    from launch.commands.run import run_locally

    resume_from, config = resume_point(options), load_config(options.run_file, options.overrides)
    how = {} if options.max_retries is None else {"max_retries": options.max_retries}
    return run_locally(config, resume=options.resume, fresh=options.fresh, resume_from=resume_from, **how)


def _submit(options: argparse.Namespace) -> int:
    from launch.commands.submit import dependency, submit_run

    resume_from = resume_point(options)
    if is_family(options):
        from launch.commands.family.command import submit_family_of

        refuse_resume_point(options)
        return submit_family_of(options, _tell)
    if options.dry_run:
        dependency(options.after)
        return _plan(options)

    config = load_config(options.run_file, options.overrides)
    how = {"resume": options.resume, "fresh": options.fresh}
    layout = submit_run(config, options.site_file, **how, after=options.after, tell=_tell, resume_from=resume_from)
    return _wait(layout) if options.wait else 0


def _resume(options: argparse.Namespace) -> int:
    from launch.commands.resume import resume_run

    where = resume_point(options)
    layout = resume_run(_layout(options), options.words, after=options.after, tell=_tell, resume_from=where)
    return _wait(layout) if options.wait else 0


def _wait(layout: RunLayout) -> int:
    from launch.commands.wait_for_run import wait_for_run

    return wait_for_run(layout)


def _status(options: argparse.Namespace) -> int:
    from launch.commands.status import render_status

    print(render_status(_layout(options), as_json=options.json))
    return 0


def _list(options: argparse.Namespace) -> int:
    from launch.commands.overview.command import list_runs

    return list_runs(options)


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


def _doctor(options: argparse.Namespace) -> int:
    from launch.commands.doctor.command import doctor

    files = [word for word in options.words if "=" not in word]
    options.overrides = [word for word in options.words if "=" in word]
    options.run_file = Path(files[0]) if files else None
    if len(files) > 1:
        raise ConfigError(f"{files[1]!r}: legal: at most one run file, and overrides (key=value)")
    if options.overrides and not files:
        raise ConfigError(f"{options.overrides[0]!r}: an override needs a run file, and none is given")
    return doctor(options)


def _layout(options: argparse.Namespace) -> RunLayout:
    from launch.common.paths import without_dots

    return RunLayout(without_dots(options.run_dir))


def _tell(line: str) -> None:
    print(line, flush=True)


def _export(options: argparse.Namespace) -> int:
    from launch.commands.export import export_run

    print(export_run(_layout(options), options.out, options.step, is_average=options.ema))
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from launch.commands.evaluate.command import evaluate

    return evaluate(options)


def _compare(options: argparse.Namespace) -> int:
    from launch.commands.evaluate.compare import compare

    return compare(options)


def _recipes(options: argparse.Namespace) -> int:
    from launch.commands.recipes import copy_recipe, recipe_table

    if options.action is None:
        print(recipe_table())
        return 0
    copy = copy_recipe(options.name, options.directory)
    print(f"{copy}: put your paths into model.path and data.path; `rlhpc check {copy} --site SITE.toml` comes next")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from launch.demo.run import RUN_FILE, fit_to, run_demo, say

    run_file = options.run_file or RUN_FILE
    if not options.slurm:
        from launch.checks.gpus import gpus_here
        from launch.commands.run import run_locally
        from launch.plan.gpu_map import map_gpus

        gpus = gpus_here(os.environ)
        words = [*(() if options.run_file else fit_to(gpus)), *options.overrides]
        map_gpus(load_config(run_file, words), gpus)  # refused before the warm start
        return run_demo(lambda config: run_locally(config, fresh=True), run_file, words)
    from launch.demo import slurm

    overrides = [*slurm.OVERRIDES, *options.overrides]
    return run_demo(lambda config: slurm.run_on_slurm(config, options.time, say), run_file, overrides)


if __name__ == "__main__":
    sys.exit(main())
