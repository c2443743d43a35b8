"""The command line: ``rlhpc run | check | plan | status | stop | export | demo | cluster``.

Light until a command needs more: ``rlhpc --help`` and ``rlhpc check`` load no torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlhpc.config import Config
from rlhpc.config_file import load_config
from rlhpc.errors import RlhpcError, RunDirectoryError
from rlhpc.run_layout import RunLayout

EXIT_USER = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every error is a line on stderr and exit status 2."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if any(word.startswith("-") or "=" not in word for word in rest) or (rest and "overrides" not in options):
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    if rest:  # argparse takes no more positionals after an option: `run RUN.toml --fresh run.seed=1`
        options.overrides = [*options.overrides, *rest]
    try:
        status: int = options.command(options)
    except RlhpcError as error:
        sys.stderr.write(f"rlhpc: {error}\n")
        return EXIT_USER
    except BrokenPipeError:  # `rlhpc status … | head`
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlhpc", description="Asynchronous RL post-training of language models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=function)
        return sub

    run = command("run", _run, "Start a run as processes of this machine and watch it.")
    _takes_run_file(run)
    again = run.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on from the last complete checkpoint")
    again.add_argument("--fresh", action="store_true", help="delete the run directory and start anew")
    check = command("check", _check, "Validate a run file, its model and its data; print the plan and its memory.")
    _takes_run_file(check)
    check.add_argument("--site", type=Path, metavar="SITE.toml", help="refuse a layout that cannot fit the GPUs there")
    plan = command("plan", _plan, "Print the Slurm jobs of a run and their exact scripts; submit nothing.")
    plan.add_argument("run_file", type=Path, metavar="RUN.toml")
    plan.add_argument("site_file", type=Path, metavar="SITE.toml")
    plan.add_argument("overrides", nargs="*", metavar="key=value")
    for name, function, text in (
        ("status", _status, "Show every role of a run: state, version, what it holds, what it waits for."),
        ("stop", _stop, "Finish the step, save, and end every process of a run."),
    ):
        command(name, function, text).add_argument("run_dir", type=Path)
    export = command("export", _export, "Write the trained model as an HF checkpoint.")
    export.add_argument("run_dir", type=Path)
    export.add_argument("out", type=Path)
    export.add_argument("--step", type=int, default=None, help="checkpoint to take; default: the newest complete one")
    demo = command("demo", _demo, "Warm-start a tiny model and teach it arithmetic by RL, in minutes, on CPU.")
    demo.add_argument("--run-file", type=Path, metavar="FILE", help="another run file for the same task and model")
    demo.add_argument("overrides", nargs="*", metavar="key=value")
    _takes_cluster_commands(command("cluster", _cluster, "A private Slurm in one directory, with fake GPUs; no root."))
    return parser


def _takes_cluster_commands(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for action, text in (
        ("up", "Start a cluster, or what has died of one; print how to use it."),
        ("status", "Show every daemon by pid, and the nodes."),
        ("down", "End every job and every daemon."),
    ):
        sub = actions.add_parser(action, help=text, description=text)
        sub.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="default: one per user in /tmp")
        if action == "down":
            sub.add_argument("--delete", action="store_true", help="delete the directory too")
        if action == "up":
            for name, of in (("train", "nodes"), ("gen", "nodes"), ("cpu", "nodes"), ("gpus", "fake GPUs of a node")):
                sub.add_argument(f"--{name}", type=int, metavar="N", help=of)
            sub.add_argument("--accounting", action="store_true", help="with slurmdbd: sacct, accounts, QOS")
            sub.add_argument("--private", action="store_true", help="unpacked packages even where Slurm is installed")
            sub.add_argument("--wait-s", type=float, default=30.0, metavar="S", help="until all nodes are idle (30)")


def _cluster(options: argparse.Namespace) -> int:
    from launch.dev_cluster import commands

    actions = {"up": commands.up, "status": commands.status, "down": commands.down}
    return actions[options.action](options)


def _takes_run_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", type=Path, metavar="RUN.toml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. trainer.learning_rate=2e-6")


def _check(options: argparse.Namespace) -> int:
    from launch.memory_verdict import memory_report
    from launch.plan import describe_plan, plan_run
    from launch.preflight import preflight

    config = load_config(options.run_file, options.overrides)
    findings = preflight(config)
    memory = memory_report(config, findings.model, findings.shape, options.site)
    print(describe_plan(plan_run(config, RunLayout(config.run_directory)), config))
    size = f", {findings.shape.num_parameters / 1e9:.3g} G parameters" if findings.shape else ""
    print(f"model       {config.model.path} ({findings.model_type}, context {findings.max_positions}{size})")
    data = findings.dataset
    print(
        f"data        {data.num_records} records, prompts of {data.mean_prompt_tokens:.0f} tokens on average, "
        f"{data.longest_prompt_tokens} at most ({data.longest_source})"
    )
    print(memory)
    return 0


def _plan(options: argparse.Namespace) -> int:
    from launch.job_report import plan_report
    from launch.site_file import load_site

    print(plan_report(load_config(options.run_file, options.overrides), load_site(options.site_file)))
    return 0


def _run(options: argparse.Namespace) -> int:
    return run_locally(load_config(options.run_file, options.overrides), resume=options.resume, fresh=options.fresh)


def run_locally(config: Config, *, resume: bool = False, fresh: bool = False) -> int:
    """Check everything, claim the run directory, run all roles here, return the exit status."""
    from launch.local import LocalExecutor
    from launch.plan import plan_run
    from launch.preflight import preflight
    from launch.run_directory import claim, mint_keys, register_launcher
    from launch.watch import Watch

    preflight(config)
    layout = RunLayout(config.run_directory)
    attempt = claim(config, layout, resume=resume, fresh=fresh)
    plan = plan_run(config, layout, attempt=attempt.index, resume_step=attempt.resume_step)
    mint_keys(plan)
    register_launcher(layout)
    watch = Watch(layout, sys.stderr)
    for change in attempt.changed:
        watch.tell(f"resumed with {change}")
    with LocalExecutor(plan, watch.tell) as executor:
        status = executor.wait(watch.look)
    watch.close()
    return status


def _status(options: argparse.Namespace) -> int:
    from launch.status import render_status

    print(render_status(RunLayout(options.run_dir.absolute())))
    return 0


def _stop(options: argparse.Namespace) -> int:
    from launch.run_directory import launcher_of

    layout = RunLayout(options.run_dir.absolute())
    if not layout.config.exists():
        raise RunDirectoryError(f"{layout.root}: not a run directory")
    pid = launcher_of(layout)
    if pid is None:
        print(f"{layout.root}: nothing runs here")
        return 0
    os.kill(pid, signal.SIGTERM)
    while launcher_of(layout) is not None:
        time.sleep(0.2)
    print(f"{layout.root}: " + ("complete" if layout.summary.exists() else "stopped; `rlhpc run … --resume` goes on"))
    return 0


def _export(options: argparse.Namespace) -> int:
    from launch.export import export_run

    print(export_run(RunLayout(options.run_dir.absolute()), options.out, options.step))
    return 0


def _demo(options: argparse.Namespace) -> int:
    from launch.demo.run import RUN_FILE, run_demo

    return run_demo(options.run_file or RUN_FILE, options.overrides)


if __name__ == "__main__":
    sys.exit(main())
