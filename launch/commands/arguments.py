"""The commands of `rlhpc`, each with its arguments and a line of help.  Imports nothing heavy.

Output: a parser whose result has the command's name as `command`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from launch.common.text import optional_module, without_dots
from rlhpc.base.near_names import near_hint, nearest
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import ConfigError, RunDirectoryError

if TYPE_CHECKING:
    from launch.run_directory.prepare import ResumePoint


# ------------------------------------------------------------------------------------------------------------ arguments
#
# Arguments as `rlhpc COMMAND --help` lists them: _takes_COMMAND adds those of a command to its parser.

MOST_ROWS = 40  # shown of a list
_BEGINNINGS = ("--resume", "--fresh", "--from-start", "--no-replay", "--step")
_OF_PREDICTIONS = {
    "from_run": "--from", "mean_tokens": "--mean-tokens", "dropped_share": "--dropped-share", "json": "--json"
}  # fmt: skip
_Parser = argparse.ArgumentParser
_Place = argparse._ActionsContainer  # a parser, or a group of its arguments


class _ParserWithHints(argparse.ArgumentParser):
    """Parser that answers a wrong choice with the legal ones, and the most similar.

    Options must not be abbreviated: `submit --seed 3` would mean --seeds, three runs.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(**how, allow_abbrev=False)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            legal = [*map(str, action.choices)]
            raise argparse.ArgumentError(action, f"{value!r}; legal: {', '.join(legal)}{near_hint(str(value), legal)}")


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


def _value(to: _Place, name: str, metavar: str, text: str, type: Callable[[str], Any] = str, **how: Any) -> None:
    to.add_argument(name, metavar=metavar, help=text, type=type, **how)


def _words(to: _Place, name: str, metavar: str, text: str, type: Callable[[str], Any] = str) -> None:
    """Add an argument of any number of words; with a default, without which argparse lists it as required."""
    to.add_argument(name, nargs="*", default=[], metavar=metavar, help=text, type=type)


def _flag(to: _Place, *names_and_text: str, **how: Any) -> None:
    *names, text = names_and_text
    to.add_argument(*names, action="store_true", help=text, **how)


def _takes_json(parser: _Place, text: str = "JSON output for programs") -> None:
    _flag(parser, "--json", text)


def _takes_run_directory(parser: _Place) -> None:
    _value(parser, "run_dir", "RUN_DIR", "directory of a run, e.g. runs/NAME", Path)


def _takes_run_file(parser: _Place) -> None:
    _value(parser, "run_file", "RUN.toml", "run file: what is trained, and how", Path)


def _takes_site_file(parser: _Place) -> None:
    _value(parser, "site_file", "SITE.toml", "site file: partitions, GPUs, time", Path)


def _takes_overrides(parser: _Place, example: str = "trainer.learning_rate=2e-6") -> None:
    _words(parser, "overrides", "key=value", f"override a key of the run file, e.g. {example}")


def _takes_beginning(parser: _Parser, *, samples: bool = True) -> None:
    """Add options to resume a run, from which step, or to start over.  samples: the run has rollouts."""
    again = parser.add_mutually_exclusive_group()
    _flag(again, "--resume", "continue from the newest sound checkpoint")
    _flag(again, "--fresh", "delete the run directory and start over")
    _takes_resume_point(parser, samples=samples)


def _takes_resume_point(parser: _Parser, *, samples: bool = True) -> None:
    where = parser.add_mutually_exclusive_group()
    aside = "checkpoints and rollouts" if samples else "checkpoints"
    _flag(where, "--from-start", f"resume at step 0: set all {aside} aside")
    _value(where, "--step", "N", "resume from this checkpoint; set newer ones aside", number)
    if not samples:
        parser.set_defaults(no_replay=False, lift_quarantine=False)
        return
    text = "do not train the steps after the checkpoint again from the journal: sample new rollouts for them"
    _flag(where, "--no-replay", text)
    text = "sample the prompts again that were given up because generators or reward workers died of them"
    _flag(parser, "--lift-quarantine", text)


def _takes_waiting(parser: _Parser) -> None:
    """Add options to watch the run, and to start it after another job."""
    _flag(parser, "--wait", "watch the run until it ends; Ctrl-C leaves jobs running")
    _value(parser, "--after", "JOB", "start after this job has succeeded; also afterany:JOB, …")


def _takes_run(parser: _Parser) -> None:
    _takes_run_file(parser)
    _takes_overrides(parser)
    _takes_beginning(parser)
    _takes_patience(parser)


def _takes_patience(parser: _Parser) -> None:
    _flag(parser, "--quiet", "print nothing but what goes wrong")
    _value(parser, "--max-retries", "N", "attempts after failed ones without a new checkpoint; default: 5", number)


def _takes_sft(parser: _Parser) -> None:
    _takes_run_file(parser)
    _takes_overrides(parser, "sft.learning_rate=2e-5")
    _takes_beginning(parser, samples=False)
    _takes_patience(parser)
    _value(parser, "--site", "SITE.toml", "submit it as jobs instead of running it on this machine", Path)
    _takes_waiting(parser)


def _takes_check(parser: _Parser) -> None:
    _value(parser, "run_file", "RUN.toml|RUN_DIR", "run file, or directory of a run", Path)
    _takes_overrides(parser)
    _takes_json(parser, "JSON output for programs (RUN_DIR only)")
    _value(parser, "--site", "SITE.toml", "site file: refuse what does not fit its GPUs", Path)


def _takes_audit(parser: _Parser) -> None:
    _takes_run_directory(parser)
    _flag(parser, "--quick", "read neither tokens nor checksums: seconds on long runs")
    _takes_json(parser)


def _takes_plan(parser: _Parser) -> None:
    """Add run file, site file, and the inputs of a prediction."""
    _takes_run_file(parser)
    _takes_site_file(parser)
    _takes_overrides(parser)
    text = "instead of jobs and scripts, predict speed, bottleneck and cost of this split and others"
    _flag(parser, "--predict", text)
    text = "take rates and lengths from this run (--predict)"
    _value(parser, "--from", "RUN_DIR", text, Path, dest="from_run")
    text = "mean tokens of a completion; default: 0.4 of generation.max_completion_tokens (--predict)"
    _value(parser, "--mean-tokens", "N", text, decimal)
    _value(parser, "--dropped-share", "X", "share of zero-variance groups; default: 0.2 (--predict)", decimal)
    _takes_json(parser, "JSON output for programs (--predict)")


def _takes_submission(parser: _Parser) -> None:
    _takes_run_file(parser)
    _takes_site_file(parser)
    _takes_overrides(parser)
    _flag(parser, "--dry-run", "check all, print the jobs as `rlhpc plan` does; submit nothing")
    _takes_beginning(parser)
    _value(parser, "--seeds", "N|S,S", "N runs with different run.seed, or one for each seed S")
    text = "submit a run for each value; repeated for several keys: for every combination"
    _value(parser, "--sweep", "key=v,v", text, action="append", default=[])
    _takes_waiting(parser)


def _takes_resume(parser: _Parser) -> None:
    _takes_run_directory(parser)
    text = "new site file, new settings; default: those of the last submit"
    _words(parser, "words", "SITE.toml|key=value", text)
    _takes_resume_point(parser)
    _takes_waiting(parser)


def _takes_status(parser: _Parser) -> None:
    _takes_run_directory(parser)
    _takes_json(parser)


def _takes_list(parser: _Parser) -> None:
    _words(parser, "directories", "DIR", "default: runs/ if it exists, else the current directory", Path)
    _value(parser, "--state", "S[,S]", "only runs in these states: queued, running, failed, …")
    _flag(parser, "--all", f"show more than {MOST_ROWS} lines, and other users' runs")
    _value(parser, "--depth", "N", "levels below DIR; 0: DIR alone (default 4)", number)
    _takes_json(parser)


def _takes_stop(parser: _Parser) -> None:
    _takes_run_directory(parser)
    _flag(parser, "--now", "end at once: the step is saved only if it ends within seconds")


def _takes_scale(parser: _Parser) -> None:
    _takes_run_directory(parser)
    _words(parser, "words", "SITE.toml", "site file; default: that of the last submit")
    what = parser.add_mutually_exclusive_group(required=True)
    _value(what, "--generators", "+N|-N", "add N, or retire the N added last")
    what.add_argument("--service", nargs=2, metavar=("NAME", "+N|-N"), help="the same for replicas of a [[service]]")
    _value(parser, "--partition", "P", "partition instead of the site file's; may be preemptible")
    _value(parser, "--time", "T", "time limit, instead of the site file's")
    _flag(parser, "--dry-run", "print what would be done")


def _takes_logs(parser: _Parser) -> None:
    _takes_run_directory(parser)
    text = 'such as "trainer", "generator-1", the name of a service, "slurm" for batch logs; default: all'
    _words(parser, "words", "ROLE", text)
    _flag(parser, "-f", "--follow", "print new lines until the run ends")


def _takes_report(parser: _Parser) -> None:
    _takes_run_directory(parser)
    _value(parser, "--html", "FILE", "write one page for a browser", Path)


def _takes_rollouts(parser: _Parser) -> None:
    """Add a run, and the selection of its rollouts."""
    _takes_run_directory(parser)
    _value(parser, "--step", "N|A-B", "trained in step N, or in steps A to B")
    _value(parser, "--task", "T", "scored by this reward function")
    _value(parser, "--dataset", "NAME", "of this dataset, one of several tables [[data]]")
    _value(parser, "--verdict", "V", "correct, wrong or verifier_error")
    _value(parser, "--min-reward", "R", "minimum reward", decimal)
    _value(parser, "--max-reward", "R", "maximum reward", decimal)
    text = "Python regular expression, searched in prompt, completion, reference and the verifier's detail"
    _value(parser, "--grep", "REGEX", text)
    _value(parser, "--sample", "N", "N of these at random, the same ones each time", number)
    _value(parser, "--tokenizer", "DIR", "checkpoint directory with the tokenizer; default: model.path", Path)
    how = parser.add_mutually_exclusive_group()
    _takes_json(how, "one JSON object per line, for programs")
    _value(how, "--html", "FILE", "write one page for a browser", Path)


def _takes_metrics(parser: _Parser) -> None:
    """Add a run, the selection of its metrics, and their destination."""
    _takes_run_directory(parser)
    text = "only this metric, or those that match a pattern such as 'reward/*'; may be repeated"
    _value(parser, "--tag", "PATTERN", text, action="append", default=[])
    where = parser.add_mutually_exclusive_group()
    _value(where, "--out", "FILE", "write a file, .csv or .parquet; default: print CSV", Path)
    text = "write an offline run of Weights & Biases below this directory (default: the current one)"
    _value(where, "--wandb", "DIR", text, Path, nargs="?", const=Path())
    _flag(parser, "-f", "--follow", "with --wandb: send steps as the run makes them, until it ends, to wandb's server")


def _takes_charts(parser: _Parser) -> None:
    text = "runs, or directories with runs; default: runs/ if it exists, else the current directory"
    _words(parser, "directories", "RUN_DIR|DIR", text, Path)
    _value(parser, "--port", "N", "default: 6006, or one that is free; 0: any", number)
    _flag(parser, "--bind-all", "listen on all interfaces, for other machines")


def _takes_doctor(parser: _Parser) -> None:
    """Add a site, and the extent of its checks."""
    _takes_site_file(parser)
    text = "the run to check for, with overrides; default: a minimal one"
    _words(parser, "words", "RUN.toml|key=value", text)
    _flag(parser, "--quick", "check from this machine only, without jobs")
    _value(parser, "--timeout-s", "S", "time limit for the test jobs, in seconds (default 300)", decimal, default=300.0)
    _value(parser, "--report", "FILE", "write everything, without secrets, to a file", Path)


def _takes_data(parser: _Parser) -> None:
    """Add an action, a dataset, and their options."""
    text = "head: show the first records, or their prompts; stats: statistics; convert: write OUT"
    _value(parser, "action", "head|stats|convert", text, choices=("head", "stats", "convert"))
    _value(
        parser, "data", "FILE|RUN.toml", "a dataset, as data.path; or a run file, to use its datasets and model", Path
    )
    text = "convert: OUT, a .jsonl or .parquet file, or a directory for --validation; settings of data and generation"
    _words(parser, "words", "OUT|key=value", text)
    _value(parser, "--model", "DIR", "checkpoint directory, to show prompts and count tokens", Path)
    parser.add_argument("-n", "--records", type=number, metavar="N", help="head: number of records (default 3)")
    bounds = parser.add_argument_group("filters for convert", "lengths are those of prompts, as a model sees them")
    for bound in ("--min-tokens", "--max-tokens", "--min-characters", "--max-characters"):
        bounds.add_argument(bound, type=number, metavar="N")
    _flag(bounds, "--distinct", "keep only the first of records with the same prompt")
    _flag(bounds, "--valid", "leave out records that a run would refuse, and say which")
    text = "fraction that goes to OUT/validation, the rest to OUT/train; chosen by content, not by order"
    _value(bounds, "--validation", "SHARE", text, decimal)


def _takes_records(parser: _Parser) -> None:
    """Add a task, a file of completions, and settings of their judgement."""
    _value(parser, "task", "TASK", "as data.task of a run file; also package.module:function")
    text = (
        "completions and references, one JSON object per line (default: standard input); settings of rewards, sandbox"
    )
    _words(parser, "words", "FILE.jsonl|key=value", text)
    _value(parser, "--run", "RUN.toml", "take settings from this run file", Path)
    text = "field of a record that holds the completion (default: completion)"
    _value(parser, "--completion", "FIELD", text, default="completion")
    text = "field that holds the reference (default: as RUN.toml says, else reference); '*': the whole record, as JSON"
    _value(parser, "--reference", "FIELD", text)
    _takes_json(parser, "JSON lines instead of a table")


def _takes_export(parser: _Parser) -> None:
    _takes_run_directory(parser)
    _value(parser, "out", "OUT", "directory to create", Path)
    _value(parser, "--step", "N", "checkpoint to export; default: the newest sound one", number)
    _flag(parser, "--ema", "the moving average of the weights (trainer.ema_decay)")
    _flag(parser, "--adapter", "the adapters alone, as PEFT loads them ([lora]); default: added to the model's weights")
    text = "dtype of the written weights; default: that of the model at model.path, of adapters float32"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=text)


def takes_evaluation(parser: _Parser) -> None:
    """Add a model, a dataset, and the extent of sampling."""
    text = "HF checkpoint, PEFT adapter, run directory, or one checkpoint in it"
    _value(parser, "model", "MODEL|RUN_DIR", text, Path)
    text = "a file or directory, as data.path; default: what [[evaluation]] of the run file says"
    _value(parser, "data", "DATA", text, Path, nargs="?")
    text = "set a key of data, generation or rewards, e.g. data.task=math_answer; default: as in the run"
    _words(parser, "overrides", "key=value", text)
    text = "run file or run directory whose settings an HF checkpoint is evaluated with: template, limits, reward"
    _value(parser, "--run", "RUN", text, Path)
    _value(parser, "--step", "N", "checkpoint of the run; default: the newest sound one", number)
    text = "several checkpoints of the run, such as 10,20,30, or all; those of adapters on the same engines"
    _value(parser, "--steps", "STEPS", text)
    text = "another model as well, any number of times; adapters beside one model on the same engines"
    parser.add_argument("--with", action="append", metavar="MODEL", help=text, type=Path, dest="others")
    text = "the moving average of the run's weights (trainer.ema_decay) instead of its weights"
    _flag(parser, "--ema", text, default=None)
    _value(parser, "--samples", "K", "samples per prompt (default 1)", number)
    _value(parser, "--prompts", "N", "number of prompts, drawn at random; default: all", number)
    _value(parser, "--temperature", "T", "of sampling; 0: the most likely token each time (default 1)", decimal)
    text = "where samples and figures go; default: evaluations/ in the run directory, or here"
    _value(parser, "--out", "DIRECTORY", text, Path)
    _flag(parser, "--fresh", "delete existing samples, and start over")
    _takes_json(parser)
    _flag(parser, "--follow", "evaluate each new checkpoint of a run until it ends; with curves for TensorBoard")
    _value(parser, "--every", "N", "minimum steps between two evaluations (--follow)", number)
    text = "keep the model with the best FIGURE, such as pass@1, as an HF checkpoint (--follow)"
    _value(parser, "--keep-best", "FIGURE", text)
    text = "stop the run after N evaluations without improvement (--follow --keep-best)"
    _value(parser, "--stop-after", "N", text, number)
    text = "stop after S seconds without a sign of life of the run (--follow; default 3600)"
    _value(parser, "--patience-s", "S", text, decimal, default=3600.0)
    text = "site file: submit it as a Slurm job, with the GPUs of [evaluation], or else [generation], on one node"
    _value(parser, "--site", "SITE.toml", text, Path)
    _flag(parser, "--dry-run", "check, print the job's script; submit nothing (with --site)")


def _takes_evaluations(parser: _Parser) -> None:
    _value(parser, "first", "FIRST", "directory of an evaluation", Path)
    _value(parser, "second", "SECOND", "another evaluation, on the same data", Path)
    _takes_json(parser)


def _takes_demo(parser: _Parser) -> None:
    """Add options for another run file, or a private Slurm."""
    _value(
        parser,
        "--run-file",
        "FILE",
        "another run file, such as configs/demo_tool.toml, or demo_stages.toml",
        Path,
    )
    _flag(parser, "--slurm", "as one heterogeneous job on a private Slurm on this machine")
    _value(parser, "--time", "T", "time limit of the job of --slurm (default 0:30:00)", default="0:30:00")
    text = "write only a tiny model of random weights, to try a run file of yours with: model.path=DIR"
    _value(parser, "--model-only", "DIR", text, Path)
    text = "with --model-only: of this checkpoint's architecture, with its tokenizer (its weights are not needed)"
    _value(parser, "--like", "MODEL", text, Path)
    _takes_overrides(parser)


def _takes_kind_of_file(parser: _Parser) -> None:
    parser.add_argument("kind", choices=("run", "site", "metrics"), help="kind of file, or names of metrics")


def _takes_shell(parser: _Parser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to print it for")


def _takes_recipe(parser: _Parser) -> None:
    """Add an optional action `copy` with a name and a directory."""
    actions = parser.add_subparsers(metavar="ACTION", dest="action")
    text = "Copy a recipe into a directory."
    copy = actions.add_parser("copy", help=text, description=text)
    _value(copy, "name", "NAME", "a recipe listed by `rlhpc recipes`")
    _value(copy, "directory", "DIRECTORY", "default: the current one", Path, nargs="?", default=Path())


def _takes_cluster_commands(parser: _Parser) -> None:
    """Add the actions up, status and down of a private Slurm."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for action, text in (
        ("up", "Start a cluster, or restart its dead daemons; print how to use it."),
        ("status", "Show every daemon with its pid, and the nodes."),
        ("down", "End every job and every daemon."),
    ):
        sub = actions.add_parser(action, help=text, description=text)
        _value(sub, "directory", "DIR", "default: one for each user in /tmp", Path, nargs="?")
        if action == "down":
            _flag(sub, "--delete", "delete the directory too")
        if action == "up":
            for name in ("train", "gen", "cpu"):
                _value(sub, f"--{name}", "N", f"number of {name} nodes", number)
            _value(sub, "--gpus", "N", "number of fake GPUs on each GPU node", number)
            _flag(sub, "--accounting", "with slurmdbd: sacct, accounts, QOS")
            _flag(sub, "--networks", "give every node its own network; needs root")
            _flag(sub, "--private", "use unpacked packages even if Slurm is installed")
            _value(sub, "--release", "SUITE", "Slurm of Debian bookworm, trixie or sid (22.05 to 26.05)")
            _value(sub, "--wait-s", "S", "timeout until all nodes are idle (default 30)", decimal, default=30.0)


class Version(argparse.Action):
    """Print the version, which is read only then, since reading it takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Called by argparse."""
        from importlib.metadata import version

        print(f"rlhpc {version('rlhpc')}")
        parser.exit()


# --------------------------------------------------------------------------------------------------------------- values
#
# Values that several commands read from their arguments.


def run_layout(run: Path) -> RunLayout:
    """Layout of the run in a directory.  Raises RunDirectoryError if it is missing, or is below runs/."""
    layout = RunLayout(without_dots(run))
    if not layout.is_run:
        refuse_missing(run, "directory")
    return layout


def refuse_missing(run: Path, what: str) -> None:
    """Raise RunDirectoryError if the path does not exist, or the run of this name is below runs/."""
    usual = RunLayout(Path("runs") / run)
    if usual.is_run:
        raise RunDirectoryError(f"{run}: not a run directory (did you mean {usual.root}?)")
    if not run.exists():
        raise RunDirectoryError(f"{run}: no such {what}; `rlhpc list` shows your runs")


def resume_point(options: argparse.Namespace) -> ResumePoint:
    """Read the options that say where a resume begins.  Raises ConfigError if they are given without a resume."""
    # Loads the reading of checkpoints, for which --help need not wait.
    from launch.run_directory.prepare import ResumePoint

    point = ResumePoint(options.from_start, options.step, options.no_replay, options.lift_quarantine)
    if point != ResumePoint() and not getattr(options, "resume", True):
        raise ConfigError(f"{_spelt(options)} says how a resume begins: use it with --resume")
    return point


def refuse_resume_point(options: argparse.Namespace) -> None:
    """Raise ConfigError if an option for a single run is given for several."""
    if option := _spelt(options):
        raise ConfigError(f"{option} applies to one run; use `rlhpc resume RUN_DIR` for each")


def _spelt(options: argparse.Namespace) -> str:
    """First of the given options that say where a resume begins; "" if none is given."""
    given = {
        "--from-start": options.from_start,
        "--step": options.step is not None,
        "--no-replay": options.no_replay,
        "--lift-quarantine": options.lift_quarantine,
    }
    return next((option for option, is_given in given.items() if is_given), "")


def refuse_without_predict(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option that has no effect without --predict."""
    for name, option in _OF_PREDICTIONS.items():
        if getattr(options, name) not in (None, False):
            raise ConfigError(f"{option}: legal with --predict only")


def refuse_words(parser: argparse.ArgumentParser, command: str, words: Sequence[str]) -> NoReturn:
    """Exit with the usage of a command, its unknown words, and their possible meanings."""
    commands = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    own: argparse.ArgumentParser = commands.choices[command]
    own.error(f"unrecognised arguments: {' '.join(words)}{_meant_by(words, own)}")


def _meant_by(words: Sequence[str], own: argparse.ArgumentParser) -> str:
    """Return the keys that were written as options, with their values, or else the options of a similar name."""
    # Imported here because settings take a while to load, and --help need not wait for them.
    from launch.plan.site_file import OWN_DIRECTIVES
    from rlhpc.config.file import key_meant

    takes = {action.dest for action in own._actions}
    options = [option for action in own._actions for option in action.option_strings]
    keys, of_site_files, similar = list[str](), list[str](), list[str]()
    for place, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") and not (equals and "." in name):
            continue
        after = "".join(each for each in words[place + 1 : place + 2] if not each.startswith("-"))
        key = name if "." in name else key_meant(name.replace("-", "_")) if word.startswith("--") else ""
        if key.startswith("`"):
            similar.append(key)
        elif key and takes & {"overrides", "words"}:
            keys.append(f"{key}={value if equals else after or 'true'}")
            similar += nearest(f"--{name}", options, cutoff=0.9)
        elif "site_file" in takes and word.startswith("--") and name in OWN_DIRECTIVES:
            of_site_files.append(OWN_DIRECTIVES[name])
        else:
            similar += nearest(f"--{name}", options)
    if "--dry-run" in words:
        return "; `rlhpc check` starts nothing"
    if keys:
        also = f"; or did you mean {' '.join(similar)}?" if similar else ""
        return f"; a key of the run file is set without dashes: {' '.join(keys)}{also}"
    if of_site_files:
        return f"; the site file says it: {', '.join(of_site_files)}"
    return f"; did you mean {' '.join(similar)}?" if similar else ""


def continued(typed: Sequence[str]) -> list[str]:
    """Words of the command that continues this one: all that was typed, overrides included.

    typed: words after `rlhpc`.  Only options that say where to begin are replaced, by --resume.
    """
    words, skips_next = list[str](), False
    for word in typed:
        is_of_beginning = any(option.startswith(word.partition("=")[0]) for option in _BEGINNINGS) and len(word) > 2
        if not is_of_beginning and not skips_next:
            words.append(word)
        skips_next = is_of_beginning and "--step".startswith(word)
    return ["rlhpc", *words, "--resume"]


# --------------------------------------------------------------------------------------------------------------- parser


def command_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = _ParserWithHints(prog="rlhpc", description="Asynchronous RL post-training of language models.")
    parser.add_argument("--version", action=Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in _COMMANDS:
        command.takes(commands.add_parser(command.name, help=command.text, description=command.text))
    return parser


def function_of(name: str) -> str:
    """Function of a command, "module:name"."""
    return next(command.function for command in _COMMANDS if command.name == name)


class Command(NamedTuple):
    """A command, as `rlhpc --help` lists it."""

    name: str
    takes: Callable[[argparse.ArgumentParser], None]  # adds its arguments
    text: str
    function: str  # "module:name" of the function called with them and imported then; it returns the exit status


_COMMANDS = (
    Command("run", _takes_run, "Start a run as processes on this machine and watch it.", "launch.commands.run:run"),
    Command("sft", _takes_sft, "Do the supervised fine-tuning of a run file alone, here or as Slurm jobs.",
            "launch.commands.run:sft"),
    Command("check", _takes_check, "Validate a run file, its model and its data; or verify the files of a run.",
            "launch.commands.check:check"),
    Command("audit", _takes_audit, "Prove from a run's files that no prompt was lost or trained twice.",
            "launch.verify.audit:audit"),
    Command("plan", _takes_plan, "Print the Slurm jobs of a run and their exact scripts; submit nothing.",
            "launch.commands.submit:show_plan"),
    Command("submit", _takes_submission, "Check a run, and submit its Slurm jobs.", "launch.commands.submit:submit"),
    Command("resume", _takes_resume, "Submit the jobs of a run again, to continue from its last checkpoint.",
            "launch.commands.submit:resume"),
    Command("status", _takes_status, "Show a run: its jobs and roles, their work in progress, what they wait for.",
            "launch.view.status:show_status"),
    Command("list", _takes_list, "Show your runs below a directory and in the queue, one line each.",
            "launch.commands.list_runs:list_runs"),
    Command("stop", _takes_stop, "Finish the step, save, and end every process and job of a run.",
            "launch.commands.stop:stop"),
    Command("scale", _takes_scale, "Add generators or replicas of a service to a submitted run, or remove added ones.",
            "launch.commands.scale:scale"),
    Command("logs", _takes_logs, "Show the logs of a run's processes.", "launch.commands.logs:logs"),
    Command("report", _takes_report, "Summarise a run: busy and idle times, faults, GPU-hours, advice.",
            "launch.commands.show:report_run"),
    Command("rollouts", _takes_rollouts, "Show rollouts of a run: prompts, completions, rewards.",
            "launch.commands.show:show_rollouts"),
    Command("metrics", _takes_metrics, "Print or write a run's metrics as a table, or as files of W&B.",
            "launch.commands.show:show_metrics"),
    Command("tensorboard", _takes_charts, "Show runs in TensorBoard under their names.",
            "launch.commands.show:serve_tensorboard"),
    Command("doctor", _takes_doctor, "Check a cluster for problems that would stop runs, and print remedies.",
            "launch.doctor.command:doctor"),
    Command("data", _takes_data, "Show a dataset's prompts or statistics, or convert it to another format.",
            "launch.commands.data:look_at_dataset"),
    Command("reward", _takes_records, "Score the completions in a JSONL file with a reward function.",
            "launch.commands.reward:judge_records"),
    Command("export", _takes_export, "Write the trained model as an HF checkpoint.", "launch.commands.export:export"),
    Command("evaluate", takes_evaluation, "Sample a dataset with a model; print pass@k with confidence intervals.",
            "launch.evaluate.command:evaluate"),
    Command("compare", _takes_evaluations, "Compare two evaluated models: which is better, with a confidence interval.",
            "launch.evaluate.command:compare"),
    Command("demo", _takes_demo, "Warm-start a tiny model and train it on arithmetic with RL, in minutes, on CPU.",
            "launch.demo.run:demo"),
    Command("schema", _takes_kind_of_file,
            "Print the JSON schema of run or site files, for editors, or the names of metrics.",
            "launch.commands.schema:print_schema"),
    Command("completion", _takes_shell, "Print a shell completion script for commands, options and paths.",
            "launch.commands.arguments:print_completion"),
    Command("recipes", _takes_recipe, "List run files for published runs, or copy one.",
            "launch.commands.recipes:recipes"),
    Command("cluster", _takes_cluster_commands, "Start, show or end a private Slurm in one directory, without root.",
            "launch.private_slurm.cluster:act"),
)  # fmt: skip


# Names of our commands in other programs.
_ELSEWHERE = {
    "train": "run", "start": "run", "launch": "run", "validate": "check", "lint": "check", "verify": "check",
    "kill": "stop", "cancel": "stop", "tail": "logs", "log": "logs", "ps": "list", "ls": "list", "runs": "list",
    "show": "status", "watch": "status", "sbatch": "submit", "queue": "submit", "continue": "resume",
    "score": "reward", "datasets": "data", "init": "recipes", "save": "export", "convert": "export",
    "version": "--version", "help": "--help",
}  # fmt: skip


def similar_command(word: str) -> str:
    """Command that may be meant by a mistyped word or another program's; "" for a command, an option or neither."""
    names = [command.name for command in _COMMANDS]
    if word in names or word.startswith("-"):
        return ""
    meant = nearest(word, names) or nearest(word, _ELSEWHERE)
    return _ELSEWHERE.get(word) or "".join(_ELSEWHERE.get(each, each) for each in meant)


# ----------------------------------------------------------------------------------------------------------- completion
#
# `rlhpc completion SHELL`: a script that completes commands, options and paths.
#
# Output: the script, for bash, zsh or fish, made by shtab from the parser of the command line.  It is static: to
# complete a word it starts no Python, which would take 0.1 s and more for every press of a key.

_DIRECTORIES = ("RUN_DIR", "DIR", "DIRECTORY", "OUT", "MODEL|RUN_DIR", "RUN_DIR|DIR", "FIRST", "SECOND")  # metavars


def print_completion(options: argparse.Namespace) -> int:
    """Print the script.  Raises ConfigError: shtab is not installed."""
    print(completion_script(command_parser(), options.shell))
    return 0


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Make the script.  shell: "bash", "zsh" or "fish".  Raises ConfigError: shtab is not installed."""
    shtab = optional_module("shtab", "completion")
    for action in _actions(parser):
        metavar = str(action.metavar or "")
        if metavar in _DIRECTORIES:
            action.complete = shtab.DIRECTORY
        elif action.type is Path or ".toml" in metavar or "FILE" in metavar:
            action.complete = shtab.FILE
    return str(shtab.complete(parser, shell=shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[Any]:
    """Yield actions with values of a parser and its subparsers.  `complete` is shtab's own attribute."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
        elif action.nargs != 0:
            yield action
