"""The commands of `rlhpc`, each with its arguments and a line of help.  Imports nothing heavy.

Output: a parser whose result has the command's name as `command`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlhpc.base.near_names import nearest
from rlhpc.protocol.errors import ConfigError

if TYPE_CHECKING:
    from launch.run_directory.prepare import ResumePoint


# ------------------------------------------------------------------------------------------------------------ arguments
#
# Arguments shared by commands of `rlhpc`: what `rlhpc COMMAND --help` lists.
#
# Input: an argument parser.  Output: the same parser with arguments added.  Imports nothing heavy, because every
# command loads this module.


MOST_ROWS = 40  # of a list
_BEGINNINGS = ("--resume", "--fresh", "--from-start", "--no-replay", "--step")
_OF_PREDICTIONS = {
    "from_run": "--from", "mean_tokens": "--mean-tokens", "dropped_share": "--dropped-share", "json": "--json"
}  # fmt: skip


def number(text: str) -> int:
    """Parse 0, 1, 2, …  Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}; legal: a whole number, 0 or more")
    return int(text)


def decimal(text: str) -> float:
    """Parse 3, 0.5, 1e-3, …  Raises ArgumentTypeError."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; legal: a number, without a unit") from None


def takes_submission(parser: argparse.ArgumentParser) -> None:
    """Run file, site file, and how to submit."""
    takes_run_file(parser)
    takes_site_file(parser)
    takes_overrides(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the jobs as `rlhpc plan` does; submit nothing")
    _takes_beginning(parser)
    parser.add_argument("--seeds", metavar="N|S,S", help="N runs with different run.seed, or one for each seed S")
    sweep = "submit a run for each value; repeated for several keys: for every combination"
    parser.add_argument("--sweep", action="append", default=[], metavar="key=v,v", help=sweep)
    takes_waiting(parser)


def _takes_beginning(parser: argparse.ArgumentParser) -> None:
    """Whether a run goes on, and where, or starts over."""
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="continue from the newest sound checkpoint")
    again.add_argument("--fresh", action="store_true", help="delete the run directory and start over")
    takes_resume_point(parser)


def takes_waiting(parser: argparse.ArgumentParser) -> None:
    """Whether to watch the run, and which job to wait for."""
    parser.add_argument("--wait", action="store_true", help="watch the run until it ends; Ctrl-C leaves jobs running")
    parser.add_argument("--after", metavar="JOB", help="start after this job has succeeded; also afterany:JOB, …")


def takes_resume(parser: argparse.ArgumentParser) -> None:
    """A run that was submitted, and what is to be other than before."""
    takes_run_directory(parser)
    again = "new site file, new settings; default: those of the last submit"
    parser.add_argument("words", nargs="*", default=[], metavar="SITE.toml|key=value", help=again)
    takes_resume_point(parser)
    takes_waiting(parser)


def takes_scale(parser: argparse.ArgumentParser) -> None:
    """A run, and how many generators to add or remove."""
    takes_run_directory(parser)
    text = "site file; default: that of the last submit"
    parser.add_argument("words", nargs="*", default=[], metavar="SITE.toml", help=text)
    parser.add_argument("--generators", required=True, metavar="+N|-N", help="add N, or remove the N added last")
    parser.add_argument("--partition", metavar="P", help="partition instead of the site file's; may be preemptible")
    parser.add_argument("--time", metavar="T", help="time limit, instead of the site file's")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")


def takes_export(parser: argparse.ArgumentParser) -> None:
    """A run, and where its model goes."""
    takes_run_directory(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to create")
    parser.add_argument("--step", type=number, metavar="N", help="checkpoint to export; default: the newest sound one")
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights (trainer.ema_decay)")
    text = "dtype of the written weights; default: that of the model at model.path"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=text)


def takes_evaluation(parser: argparse.ArgumentParser) -> None:
    """A model, a dataset, and how much to sample."""
    model = "HF checkpoint, run directory, or one checkpoint in it"
    parser.add_argument("model", type=Path, metavar="MODEL|RUN_DIR", help=model)
    text = "a file or directory, as data.path; default: what [[evaluation]] of the run file says"
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA", help=text)
    text = "set a key of data, generation or rewards, e.g. data.task=math_answer; default: as in the run"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=text)
    text = "run file or run directory whose settings an HF checkpoint is evaluated with: template, limits, reward"
    parser.add_argument("--run", type=Path, metavar="RUN", help=text)
    parser.add_argument("--step", type=number, metavar="N", help="checkpoint of the run; default: the newest sound one")
    text = "the moving average of the run's weights (trainer.ema_decay) instead of its weights"
    parser.add_argument("--ema", action="store_true", default=None, help=text)
    parser.add_argument("--samples", type=number, metavar="K", help="samples per prompt (default 1)")
    parser.add_argument("--prompts", type=number, metavar="N", help="number of prompts, drawn at random; default: all")
    text = "of sampling; 0: the most likely token each time (default 1)"
    parser.add_argument("--temperature", type=decimal, metavar="T", help=text)
    text = "where samples and figures go; default: evaluations/ in the run directory, or here"
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help=text)
    parser.add_argument("--fresh", action="store_true", help="delete existing samples, and start over")
    parser.add_argument("--json", action="store_true", help="JSON output for programs")
    text = "evaluate each new checkpoint of a run until it ends; with curves for TensorBoard"
    parser.add_argument("--follow", action="store_true", help=text)
    parser.add_argument("--every", type=number, metavar="N", help="minimum steps between two evaluations (--follow)")
    text = "keep the model with the best FIGURE, such as pass@1, as an HF checkpoint (--follow)"
    parser.add_argument("--keep-best", metavar="FIGURE", help=text)
    text = "stop the run after N evaluations without improvement (--follow --keep-best)"
    parser.add_argument("--stop-after", type=number, metavar="N", help=text)
    text = "stop after S seconds without a sign of life of the run (--follow; default 3600)"
    parser.add_argument("--patience-s", type=decimal, default=3600.0, metavar="S", help=text)
    text = "site file: submit it as a Slurm job, with the GPUs of [evaluation], or else [generation], on one node"
    parser.add_argument("--site", type=Path, metavar="SITE.toml", help=text)
    parser.add_argument("--dry-run", action="store_true", help="print the job's script; submit nothing (with --site)")


def takes_records(parser: argparse.ArgumentParser) -> None:
    """A task, a file of completions, and how to judge them."""
    parser.add_argument("task", metavar="TASK", help="as data.task of a run file; also package.module:function")
    text = (
        "completions and references, one JSON object per line (default: standard input); settings of rewards, sandbox"
    )
    parser.add_argument("words", nargs="*", default=[], metavar="FILE.jsonl|key=value", help=text)
    text = "take settings from this run file"
    parser.add_argument("--run", type=Path, metavar="RUN.toml", help=text)
    text = "field of a record that holds the completion (default: completion)"
    parser.add_argument("--completion", default="completion", metavar="FIELD", help=text)
    text = "field that holds the reference (default: as RUN.toml says, else reference); '*': the whole record, as JSON"
    parser.add_argument("--reference", metavar="FIELD", help=text)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")


def takes_data(parser: argparse.ArgumentParser) -> None:
    """What to do with which dataset."""
    text = "head: show the first records, or their prompts; stats: statistics; convert: write OUT"
    parser.add_argument("action", choices=("head", "stats", "convert"), metavar="head|stats|convert", help=text)
    text = "a dataset, as data.path; or a run file, to use its datasets and model"
    parser.add_argument("data", type=Path, metavar="FILE|RUN.toml", help=text)
    text = "convert: OUT, a .jsonl or .parquet file, or a directory for --validation; settings of data and generation"
    parser.add_argument("words", nargs="*", default=[], metavar="OUT|key=value", help=text)
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint directory, to show prompts and count tokens"
    )
    parser.add_argument("-n", "--records", type=number, metavar="N", help="head: number of records (default 3)")
    bounds = parser.add_argument_group("filters for convert", "lengths are those of prompts, as a model sees them")
    for bound in ("--min-tokens", "--max-tokens", "--min-characters", "--max-characters"):
        bounds.add_argument(bound, type=number, metavar="N")
    bounds.add_argument("--distinct", action="store_true", help="keep only the first of records with the same prompt")
    text = "fraction that goes to OUT/validation, the rest to OUT/train; chosen by content, not by order"
    bounds.add_argument("--validation", type=decimal, metavar="SHARE", help=text)


def takes_run_file(parser: argparse.ArgumentParser) -> None:
    """What a run does."""
    parser.add_argument("run_file", type=Path, metavar="RUN.toml", help="run file: what is trained, and how")


def takes_site_file(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where a run runs."""
    parser.add_argument("site_file", type=Path, metavar="SITE.toml", help="site file: partitions, GPUs, time")


def takes_overrides(parser: argparse.ArgumentParser) -> None:
    """Overrides of keys of the run file.  With a default, or argparse would list them as required."""
    text = "override a key of the run file, e.g. trainer.learning_rate=2e-6"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=text)


def takes_run_directory(parser: argparse.ArgumentParser) -> None:
    """A run that has been started or submitted."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of a run, e.g. runs/NAME")


def takes_logs(parser: argparse.ArgumentParser) -> None:
    """A run, and whose logs."""
    takes_run_directory(parser)
    what = 'such as "trainer", "generator-1", "slurm" for batch logs; default: all'
    parser.add_argument("words", nargs="*", default=[], metavar="ROLE", help=what)
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines until the run ends")


def takes_report(parser: argparse.ArgumentParser) -> None:
    """A run, and where its page goes."""
    takes_run_directory(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page for a browser")


def takes_metrics(parser: argparse.ArgumentParser) -> None:
    """A run, which of its metrics, and where they go."""
    takes_run_directory(parser)
    text = "only this metric, or those that match a pattern such as 'reward/*'; may be repeated"
    parser.add_argument("--tag", action="append", default=[], metavar="PATTERN", help=text)
    where = parser.add_mutually_exclusive_group()
    text = "write a file, .csv or .parquet; default: print CSV"
    where.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = "write an offline run of Weights & Biases below this directory (default: the current one)"
    where.add_argument("--wandb", type=Path, nargs="?", const=Path(), metavar="DIR", help=text)
    text = "with --wandb: send steps as the run makes them, until it ends, to wandb's server"
    parser.add_argument("-f", "--follow", action="store_true", help=text)


def takes_charts(parser: argparse.ArgumentParser) -> None:
    """Runs, and where TensorBoard shows them."""
    text = "runs, or directories with runs; default: runs/ if it exists, else the current directory"
    parser.add_argument("directories", type=Path, nargs="*", default=[], metavar="RUN_DIR|DIR", help=text)
    parser.add_argument("--port", type=number, metavar="N", help="default: 6006, or one that is free; 0: any")
    parser.add_argument("--bind-all", action="store_true", help="listen on all interfaces, for other machines")


def takes_rollouts(parser: argparse.ArgumentParser) -> None:
    """A run, and which of its rollouts."""
    takes_run_directory(parser)
    parser.add_argument("--step", metavar="N|A-B", help="trained in step N, or in steps A to B")
    parser.add_argument("--task", metavar="T", help="scored by this reward function")
    parser.add_argument("--verdict", metavar="V", help="correct, wrong or verifier_error")
    parser.add_argument("--min-reward", type=decimal, metavar="R", help="minimum reward")
    parser.add_argument("--max-reward", type=decimal, metavar="R", help="maximum reward")
    text = "Python regular expression, searched in prompt, completion, reference and the verifier's detail"
    parser.add_argument("--grep", metavar="REGEX", help=text)
    parser.add_argument("--sample", type=number, metavar="N", help="N of these at random, the same ones each time")
    text = "checkpoint directory with the tokenizer; default: model.path"
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help=text)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="one JSON object per line, for programs")
    how.add_argument("--html", type=Path, metavar="FILE", help="write one page for a browser")


def takes_list(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where to look for runs, and which to show."""
    text = "default: runs/ if it exists, else the current directory"
    parser.add_argument("directories", type=Path, nargs="*", default=[], metavar="DIR", help=text)
    parser.add_argument("--state", metavar="S[,S]", help="only runs in these states: queued, running, failed, …")
    parser.add_argument("--all", action="store_true", help=f"show more than {MOST_ROWS} lines, and other users' runs")
    parser.add_argument("--depth", type=number, metavar="N", help="levels below DIR; 0: DIR alone (default 4)")
    parser.add_argument("--json", action="store_true", help="JSON output for programs")


def takes_resume_point(parser: argparse.ArgumentParser) -> None:
    """Add --from-start, --step, --no-replay and --lift-quarantine."""
    where = parser.add_mutually_exclusive_group()
    text = "resume at step 0: set all checkpoints and rollouts aside"
    where.add_argument("--from-start", action="store_true", help=text)
    where.add_argument("--step", type=number, metavar="N", help="resume from this checkpoint; set newer ones aside")
    text = "do not train the steps after the checkpoint again from the journal: sample new rollouts for them"
    where.add_argument("--no-replay", action="store_true", help=text)
    text = "sample the prompts again that were given up because generators or reward workers died of them"
    parser.add_argument("--lift-quarantine", action="store_true", help=text)


def resume_point(options: argparse.Namespace) -> ResumePoint:
    """The options' value.  Raises ConfigError if they are given without a resume."""
    # Imports what reads checkpoints; --help need not wait for it.
    from launch.run_directory.prepare import ResumePoint

    point = ResumePoint(options.from_start, options.step, options.no_replay, options.lift_quarantine)
    if point != ResumePoint() and not getattr(options, "resume", True):
        raise ConfigError(f"{_spelt(options)} says how a resume begins: use it with --resume")
    return point


def refuse_resume_point(options: argparse.Namespace) -> None:
    """Raise ConfigError if an option that makes sense for one run alone is given for several."""
    if option := _spelt(options):
        raise ConfigError(f"{option} applies to one run; use `rlhpc resume RUN_DIR` for each")


def _spelt(options: argparse.Namespace) -> str:
    """The one that was given; "": none."""
    given = {
        "--from-start": options.from_start,
        "--step": options.step is not None,
        "--no-replay": options.no_replay,
        "--lift-quarantine": options.lift_quarantine,
    }
    return next((option for option, is_given in given.items() if is_given), "")


def hint_for(words: Sequence[str]) -> str:
    """A hint for keys of the run file that were written as options."""
    keys = [word for word in words if "." in word.partition("=")[0] and ("=" in word or word.startswith("--"))]
    if not keys:
        return "; `rlhpc check` starts nothing" if "--dry-run" in words else ""
    option = keys[0]
    key, equals, value = option.removeprefix("--").partition("=")
    after = words[words.index(option) + 1 :]
    value = value if equals or not after else after[0]
    return f"; a key of the run file is set without dashes: {key}={value}"


class Version(argparse.Action):
    """Print the version; reading it takes a while, and nothing else needs it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Called by argparse."""
        from importlib.metadata import version

        print(f"rlhpc {version('rlhpc')}")
        parser.exit()


def continued(typed: Sequence[str]) -> list[str]:
    """The words of the command that goes on with what this one has begun: all that was typed, overrides included.

    typed: words after `rlhpc`.  Only what says where to begin is replaced, by --resume.
    """
    words, skips_next = list[str](), False
    for word in typed:
        is_of_beginning = any(option.startswith(word.partition("=")[0]) for option in _BEGINNINGS) and len(word) > 2
        if not is_of_beginning and not skips_next:
            words.append(word)
        skips_next = is_of_beginning and "--step".startswith(word)
    return ["rlhpc", *words, "--resume"]


def takes_local_run(run: argparse.ArgumentParser) -> None:
    """The command that runs here."""
    takes_run_file(run)
    takes_overrides(run)
    _takes_beginning(run)
    run.add_argument("--quiet", action="store_true", help="print nothing but what goes wrong")
    run.add_argument(
        "--max-retries",
        type=number,
        metavar="N",
        help="attempts after failed ones without a new checkpoint; default: 5",
    )


def refuse_without_predict(options: argparse.Namespace) -> None:
    """Raises ConfigError: an option that does nothing without --predict."""
    for name, option in _OF_PREDICTIONS.items():
        if getattr(options, name) not in (None, False):
            raise ConfigError(f"{option}: legal with --predict only")


# --------------------------------------------------------------------------------------------------------------- parser


def command_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = argparse.ArgumentParser(prog="rlhpc", description="Asynchronous RL post-training of language models.")
    parser.add_argument("--version", action=Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in _COMMANDS:
        command.takes(commands.add_parser(command.name, help=command.text, description=command.text))
    return parser


def function_of(name: str) -> str:
    """The function of a command that is none of launch/cli.py."""
    return next(command.function for command in _COMMANDS if command.name == name)


def _takes_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", type=Path, metavar="RUN.toml|RUN_DIR", help="run file, or directory of a run")
    takes_overrides(parser)
    parser.add_argument("--json", action="store_true", help="JSON output for programs (RUN_DIR only)")
    parser.add_argument("--site", type=Path, metavar="SITE.toml", help="site file: refuse what does not fit its GPUs")


def _takes_audit(parser: argparse.ArgumentParser) -> None:
    takes_run_directory(parser)
    parser.add_argument("--quick", action="store_true", help="read neither tokens nor checksums: seconds on long runs")
    parser.add_argument("--json", action="store_true", help="JSON output for programs")


def _takes_plan(parser: argparse.ArgumentParser) -> None:
    """Run file, site file, and what a prediction starts from."""
    takes_run_file(parser)
    takes_site_file(parser)
    takes_overrides(parser)
    text = "instead of jobs and scripts, predict speed, bottleneck and cost of this split and others"
    parser.add_argument("--predict", action="store_true", help=text)
    text = "take rates and lengths from this run (--predict)"
    parser.add_argument("--from", dest="from_run", type=Path, metavar="RUN_DIR", help=text)
    text = "mean tokens of a completion; default: 0.4 of generation.max_completion_tokens (--predict)"
    parser.add_argument("--mean-tokens", type=decimal, metavar="N", help=text)
    text = "share of zero-variance groups; default: 0.2 (--predict)"
    parser.add_argument("--dropped-share", type=decimal, metavar="X", help=text)
    parser.add_argument("--json", action="store_true", help="JSON output for programs (--predict)")


def _takes_status(parser: argparse.ArgumentParser) -> None:
    takes_run_directory(parser)
    parser.add_argument("--json", action="store_true", help="JSON output for programs")


def _takes_stop(parser: argparse.ArgumentParser) -> None:
    takes_run_directory(parser)
    text = "end at once: the step is saved only if it ends within seconds"
    parser.add_argument("--now", action="store_true", help=text)


def _takes_kind_of_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("run", "site", "metrics"), help="kind of file, or names of metrics")


def _takes_shell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to print it for")


def _takes_cluster_commands(parser: argparse.ArgumentParser) -> None:
    """The actions up, status and down of a private Slurm."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for action, text in (
        ("up", "Start a cluster, or restart its dead daemons; print how to use it."),
        ("status", "Show every daemon with its pid, and the nodes."),
        ("down", "End every job and every daemon."),
    ):
        sub = actions.add_parser(action, help=text, description=text)
        sub.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="default: one for each user in /tmp")
        if action == "down":
            sub.add_argument("--delete", action="store_true", help="delete the directory too")
        if action == "up":
            for name in ("train", "gen", "cpu"):
                sub.add_argument(f"--{name}", type=number, metavar="N", help=f"number of {name} nodes")
            sub.add_argument("--gpus", type=number, metavar="N", help="number of fake GPUs on each GPU node")
            sub.add_argument("--accounting", action="store_true", help="with slurmdbd: sacct, accounts, QOS")
            sub.add_argument("--networks", action="store_true", help="give every node its own network; needs root")
            sub.add_argument("--private", action="store_true", help="use unpacked packages even if Slurm is installed")
            sub.add_argument(
                "--release", metavar="SUITE", help="Slurm of Debian bookworm, trixie or sid (22.05 to 26.05)"
            )
            text = "timeout until all nodes are idle (default 30)"
            sub.add_argument("--wait-s", type=decimal, default=30.0, metavar="S", help=text)


def _takes_recipe(parser: argparse.ArgumentParser) -> None:
    """Nothing, or the action copy with a name and a directory."""
    actions = parser.add_subparsers(metavar="ACTION", dest="action")
    text = "Copy a recipe into a directory."
    copy = actions.add_parser("copy", help=text, description=text)
    copy.add_argument("name", metavar="NAME", help="a recipe listed by `rlhpc recipes`")
    copy.add_argument(
        "directory", type=Path, nargs="?", default=Path(), metavar="DIRECTORY", help="default: the current one"
    )


def _takes_demo(parser: argparse.ArgumentParser) -> None:
    """Another run file, or a private Slurm."""
    parser.add_argument("--run-file", type=Path, metavar="FILE", help="another run file; configs/demo_tool.toml: tools")
    parser.add_argument(
        "--slurm", action="store_true", help="as one heterogeneous job on a private Slurm on this machine"
    )
    parser.add_argument(
        "--time", default="0:30:00", metavar="T", help="time limit of the job of --slurm (default 0:30:00)"
    )
    text = "write only a tiny model of random weights, to try a run file of yours with: model.path=DIR"
    parser.add_argument("--model-only", type=Path, metavar="DIR", help=text)
    text = "with --model-only: of this checkpoint's architecture, with its tokenizer (its weights are not needed)"
    parser.add_argument("--like", type=Path, metavar="MODEL", help=text)
    takes_overrides(parser)


def _takes_doctor(parser: argparse.ArgumentParser) -> None:
    """A site, and how thoroughly to check it."""
    takes_site_file(parser)
    which = "the run to check for, with overrides; default: a minimal one"
    parser.add_argument("words", nargs="*", default=[], metavar="RUN.toml|key=value", help=which)
    parser.add_argument("--quick", action="store_true", help="check from this machine only, without jobs")
    text = "time limit for the test jobs, in seconds (default 300)"
    parser.add_argument("--timeout-s", type=decimal, default=300.0, metavar="S", help=text)
    parser.add_argument("--report", type=Path, metavar="FILE", help="write everything, without secrets, to a file")


def _takes_evaluations(parser: argparse.ArgumentParser) -> None:
    """Directories of two evaluations."""
    parser.add_argument("first", type=Path, metavar="FIRST", help="directory of an evaluation")
    parser.add_argument("second", type=Path, metavar="SECOND", help="another evaluation, on the same data")
    parser.add_argument("--json", action="store_true", help="JSON output for programs")


class Command(NamedTuple):
    """A command, as `rlhpc --help` lists it."""

    name: str
    takes: Callable[[argparse.ArgumentParser], None]  # adds its arguments
    text: str
    function: str = ""  # "module:name" of what is called with them, imported then; "": a function of launch/cli.py


_COMMANDS = (
    Command("run", takes_local_run, "Start a run as processes on this machine and watch it."),
    Command("check", _takes_check, "Validate a run file, its model and its data; or verify the files of a run."),
    Command("audit", _takes_audit, "Prove from a run's files that no prompt was lost or trained twice."),
    Command("plan", _takes_plan, "Print the Slurm jobs of a run and their exact scripts; submit nothing."),
    Command("submit", takes_submission, "Check a run, and submit its Slurm jobs."),
    Command("resume", takes_resume, "Submit the jobs of a run again, to continue from its last checkpoint."),
    Command("status", _takes_status, "Show a run: its jobs and roles, their work in progress, what they wait for."),
    Command("list", takes_list, "Show your runs below a directory and in the queue, one line each.",
            "launch.commands.list_runs:list_runs"),
    Command("stop", _takes_stop, "Finish the step, save, and end every process and job of a run."),
    Command("scale", takes_scale, "Add generators to a submitted run, or remove added ones."),
    Command("logs", takes_logs, "Show the logs of a run's processes."),
    Command("report", takes_report, "Summarise a run: busy and idle times, faults, GPU-hours, advice."),
    Command("rollouts", takes_rollouts, "Show rollouts of a run: prompts, completions, rewards.",
            "launch.commands.show:show_rollouts"),
    Command("metrics", takes_metrics, "Print or write a run's metrics as a table, or as files of W&B."),
    Command("tensorboard", takes_charts, "Show runs in TensorBoard under their names.",
            "launch.commands.show:serve_tensorboard"),
    Command("doctor", _takes_doctor, "Check a cluster for problems that would stop runs, and print remedies."),
    Command("data", takes_data, "Show a dataset's prompts or statistics, or convert it to another format.",
            "launch.commands.data:look_at_dataset"),
    Command("reward", takes_records, "Score the completions in a JSONL file with a reward function.",
            "launch.commands.reward:judge_records"),
    Command("export", takes_export, "Write the trained model as an HF checkpoint."),
    Command("evaluate", takes_evaluation, "Sample a dataset with a model; print pass@k with confidence intervals.",
            "launch.evaluate.command:evaluate"),
    Command("compare", _takes_evaluations, "Compare two evaluated models: which is better, with a confidence interval.",
            "launch.evaluate.command:compare"),
    Command("demo", _takes_demo, "Warm-start a tiny model and train it on arithmetic with RL, in minutes, on CPU."),
    Command("schema", _takes_kind_of_file,
            "Print the JSON schema of run or site files, for editors, or the names of metrics."),
    Command("completion", _takes_shell, "Print a shell completion script for commands, options and paths."),
    Command("recipes", _takes_recipe, "List run files for published runs, or copy one."),
    Command("cluster", _takes_cluster_commands, "Start, show or end a private Slurm in one directory, without root."),
)  # fmt: skip


# What other programs call our commands.
_ELSEWHERE = {
    "train": "run", "start": "run", "launch": "run", "validate": "check", "lint": "check", "verify": "check",
    "kill": "stop", "cancel": "stop", "tail": "logs", "log": "logs", "ps": "list", "ls": "list", "runs": "list",
    "show": "status", "watch": "status", "sbatch": "submit", "queue": "submit", "continue": "resume",
    "score": "reward", "datasets": "data", "init": "recipes", "save": "export", "convert": "export",
    "version": "--version", "help": "--help",
}  # fmt: skip


def similar_command(word: str) -> str:
    """The command that a mistyped word, or one of other programs, may mean; "" for a command, an option, or neither."""
    names = [command.name for command in _COMMANDS]
    if word in names or word.startswith("-"):
        return ""
    return _ELSEWHERE.get(word) or "".join(nearest(word, names))
