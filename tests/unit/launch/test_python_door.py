"""`rlhpc.Run` and `rlhpc.submit`: small, documented, loaded when asked for."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import os
import pickle
import pydoc
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
from submitit.core.utils import FailedJobError

import rlhpc
from launch import api
from launch.api import RunJob, StartedRun
from launch.api_run import _columns, import_path, in_python, words_of
from launch.run_files.run_state import EventLog
from launch.supervisor.controller_job import SOONER
from rlhpc.config.file import load_config
from rlhpc.metrics.tensorboard import Recorder
from rlhpc.protocol.errors import CheckpointError, ConfigError, RlhpcError, RoleFailed, RunDirectoryError
from rlhpc.training.checkpoint_directory import begin, complete
from tests.ring.run_kit import make_lab
from tests.unit.doc_pages import ROOT, blocks
from tests.unit.launch.runs_kit import Runs, TextRun, living_launcher

PAGE = ROOT / "docs" / "python.md"
HEADINGS = ("Read a run", "Run and evaluate", "Submit runs")


class FirstRun(TextRun):
    """runs/first: two steps, a checkpoint."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "run.name=first", "run.num_steps=2")
        self.seal(
            [
                self.group("3 + 4 =", [("7", 1.0), ("eight", 0.0)], step=0, task="math_answer"),
                self.group("1 + 1 =", [("2", 1.0), ("2", -1.0)]),
            ]
        )
        recorder = Recorder(self.layout.tensorboard)
        for step in range(2):
            recorder.step(step, {"reward/mean": 0.25 + step})
        recorder.close()
        self.layout.checkpoints.mkdir()
        final = self.layout.checkpoint(2)
        temporary = begin(final)
        (temporary / "controller.json").write_text("{}")
        complete(temporary, final, {"step": 2, "policy_version": 2, "attempt": 0})
        self.layout.status.write_text(json.dumps({"step": 2, "phase": "training"}))


@pytest.fixture
def first(tmp_path) -> FirstRun:
    return FirstRun(tmp_path / "first")


def test_a_run_is_arrays_rollouts_and_checkpoints(first):
    run = rlhpc.Run.load(first.layout.root)
    assert (run.name, run.step, run.num_steps, run.phase, run.summary) == ("first", 2, 2, "training", None)
    np.testing.assert_array_equal(run.figures["reward/mean"].values, [0.25, 1.25])
    assert [(each.step, each.policy_version) for each in run.checkpoints] == [(2, 2)]
    assert run.checkpoints[0].path == first.layout.checkpoint(2)
    (wrong,) = run.rollouts(verdict="wrong")
    for selection in ({"verdict": "wrnog"}, {"steps": 3}, {"steps": (0,)}, {"grep": "("}, {"min_reward": "a"},
                      {"steps": (3, 1)}, {"task": "nosuch"}, {"min_reward": 1.0, "max_reward": 0.0}):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(selection))):
            list(run.rollouts(**selection))
    assert len(list(run.rollouts(steps=[0, 1], min_reward=np.float32(0.5)))) == 1
    assert (wrong.prompt, wrong.completion) == ("3 + 4 =", "eight<eos>")
    assert wrong.versions.dtype == np.int32
    assert [each.group_id for each in run.rollouts(grep=r"1 \+ 1", min_reward=0.5)] == [1]
    first.layout.summary.write_text('{"steps": 2}')
    assert run.phase == "complete"  # each question is answered anew
    assert repr(run).endswith("step 2 of 2, complete)")


def test_the_phase_of_a_run_that_has_ended_is_how_it_ended(runs):
    layout = runs.local("first")
    runs.status(layout, "training", 5)
    layout.log("trainer", 0, 0).parent.mkdir()
    layout.log("trainer", 0, 0).write_text("2026-11-22 01:16:05,123 trainer-0 rlhpc.lifecycle ERROR StarvedError: x\n")
    run = rlhpc.Run(layout.root)
    with living_launcher(layout):
        assert run.phase == "training"
    assert run.phase == "failed"
    assert repr(run).endswith("step 5 of 100, failed)")
    layout.log("trainer", 0, 0).unlink()
    assert run.phase == "lost"  # killed, with its launcher
    runs.status(layout, "stopped", 5)
    assert run.phase == "stopped"


def test_slurm_is_asked_for_the_phase_of_a_submitted_run_that_is_silent(runs, monkeypatch):
    monkeypatch.setenv("PATH", f"{runs.bin}:/usr/bin:/bin")
    layout = runs.submitted("first", 12)
    run = rlhpc.Run(layout.root)
    runs.status(layout, "training", 5)
    assert (run.phase, runs.calls()) == ("training", [])
    runs.status(layout, "training", 5, ago_s=900.0)
    runs.queue(layout, "12", "RUNNING", nodes="c0")
    assert run.phase == "training"  # a long step
    runs.queue(layout, "12", "CANCELLED")
    assert rlhpc.Run(runs.submitted("never", 13, begun=False).root).phase == "lost"
    runs.script("exit 1")
    assert run.phase == "training"  # Slurm does not answer
    runs.verdict(layout, 12, "given_up: trainer-0 on t0 ended with 70")
    assert run.phase == "failed"


def test_what_a_run_lacks_of_figures_is_told(first, tmp_path):
    figures = rlhpc.Run(first.layout.root).figures
    with pytest.raises(KeyError, match=r"did you mean reward/mean\?"):
        figures["reward"]
    empty = TextRun(tmp_path / "empty", "run.name=empty")
    with pytest.raises(KeyError, match="it has none yet"):
        rlhpc.Run(empty.layout.root).figures["reward/mean"]


@pytest.mark.parametrize("load", [rlhpc.Run, rlhpc.Run.load])
def test_a_run_is_loaded_from_its_directory_and_one_without_a_run_is_refused(first, tmp_path, load):
    assert load(str(first.layout.root)).name == "first"
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        load(tmp_path)


def test_a_run_that_does_not_run_needs_no_stop(first):
    told = list[str]()
    rlhpc.Run(first.layout.root).stop(tell=told.append)
    assert told == [f"{first.layout.root}: this run is not running"]


def test_help_shows_the_names_that_are_meant_and_plain_signatures():
    page = pydoc.plain(pydoc.render_doc(rlhpc))
    functions = page[page.index("\nFUNCTIONS") : page.index("\nDATA")]
    assert re.findall(r"^    (\w+)\(", functions, re.MULTILINE) == [name for name in rlhpc.__all__ if name != "Run"]
    assert "lambda" not in page
    assert all(f"rlhpc.{name} " in page[: page.index("PACKAGE CONTENTS")] for name in rlhpc.__all__)


def test_what_a_frame_is_made_of_has_a_row_a_rollout_and_none_for_what_it_lacks(first):
    columns = _columns(rlhpc.Run.load(first.layout.root).rollouts())
    assert {len(values) for values in columns.values()} == {4}
    assert columns["standing"] == ["trained", "trained", "dropped", "dropped"]
    assert columns["staleness"] == [0, 0, None, None]
    assert columns["part_answer"] == [1.0, 0.0, 1.0, -1.0]
    assert columns["advantage"][2:] == [None, None]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_rollouts_are_a_frame_with_a_column_for_each_part_of_the_reward(first, library):
    pytest.importorskip(library, reason=f"no {library} here: pip install 'rlhpc[frames]'")
    frame = rlhpc.Run.load(first.layout.root).frame(library)  # type: ignore[arg-type]
    assert len(frame) == 4
    assert {"group_id", "reward", "staleness", "completion", "part_answer"} <= set(frame.columns)
    assert list(frame["verdict"]) == ["correct", "wrong", "correct", "verifier_error"]
    assert list(frame["num_tokens"]) == [2, 6, 2, 2]


def test_a_frame_of_what_is_not_installed_says_what_to_install(first, monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", None)
    run = rlhpc.Run.load(first.layout.root)
    with pytest.raises(ConfigError, match=r"pip install 'rlhpc\[frames\]'"):
        run.frame("polars")
    with pytest.raises(ConfigError, match="legal: pandas, polars"):
        run.frame("excel")  # type: ignore[arg-type]


@pytest.mark.starts
def test_importing_rlhpc_loads_nothing_and_its_door_no_torch():
    program = """
import sys
before = set(sys.modules)
import rlhpc
new = {name.split('.')[0] for name in set(sys.modules) - before}
assert new <= {'rlhpc', 'importlib', '__future__', 'warnings'}, new
assert [name for name in dir(rlhpc) if not name.startswith('_')] == rlhpc.__all__
rlhpc.Run, rlhpc.submit
assert not {'torch', 'transformers', 'vllm', 'pandas', 'matplotlib'} & set(sys.modules)
try:
    rlhpc.other
except AttributeError as error:
    assert "'other'; legal: Run, check, " in str(error)
try:
    rlhpc.ConfigError
except AttributeError as error:
    assert str(error).endswith("'ConfigError'; it is in rlhpc.protocol.errors")
assert not hasattr(rlhpc, "_ipython_display_")
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_errors_are_where_the_page_says():
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    paragraph = next(each for each in page.split("\n\n") if each.startswith("**Errors**"))
    names = re.findall(r"`(\w+Error|RoleFailed)`(?: \(`([\w.]+)`\))?", paragraph)
    assert len(names) == 6
    for name, module in names:
        assert issubclass(resolve_name(f"{module or 'rlhpc.protocol.errors'}:{name}"), RlhpcError)


def test_a_figure_that_is_not_there_is_answered_with_one_that_is(first):
    with pytest.raises(KeyError, match=r"not a metric of this run \(did you mean reward/mean\?\)"):
        rlhpc.Run.load(first.layout.root).figures["reward/meen"]


@pytest.mark.starts
def test_a_run_from_python_is_the_command_and_an_error_of_its_settings_is_ours(tmp_path):
    lab, told = make_lab(tmp_path), list[str]()
    run_file = lab.run_file("short", data={"task": "exact_match"})
    with pytest.raises(ConfigError, match=r"overrides: run\.num_steps='many'"):
        rlhpc.run(run_file, ["run.num_steps=many"])
    run = rlhpc.run(run_file, ["run.num_steps=2", "admission.active_sampling=false"], tell=told.append)
    assert (run.phase, run.step) == ("complete", 2)
    assert any("complete, saved at step 2" in line for line in told)
    with pytest.raises(ConfigError, match="exists already; use resume=True to continue it, fresh=True"):
        rlhpc.run(run_file)


@pytest.mark.starts
def test_a_run_that_was_started_is_looked_at_and_stopped_and_has_the_modules_of_its_session(tmp_path, monkeypatch):
    (tmp_path / "mine_of_a_session.py").write_text("def judge(completion, reference):\n    return len(completion)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lab = make_lab(tmp_path)
    config = load_config(lab.run_file("long", run={"num_steps": 1000, "name": "long"}))
    overrides = {"data.task": "mine_of_a_session:judge", "run": {"directory": tmp_path / "runs" / "long"}}
    started = rlhpc.start(config, overrides)
    assert (started.run.phase, started.run.step, started.run.num_steps) == ("new", 0, 1000)
    assert (started.run.name, dict(started.run.figures), started.run.checkpoints) == ("long", {}, [])
    with pytest.raises(ConfigError, match="no metrics yet"):
        started.run.metrics_frame()
    while not started.done() and started.run.step < 1:
        time.sleep(0.2)
    assert not started.done()
    started.run.stop()
    run = started.wait()
    assert started.done()
    assert (run.phase, run.settings["data"][0]["task"]) == ("stopped", "mine_of_a_session:judge")
    assert load_config(tmp_path / "runs" / "long.toml").data[0].task == "mine_of_a_session:judge"
    with pytest.raises(ConfigError, match="use resume=True to continue it"):
        rlhpc.start(config, overrides)
    with pytest.raises(ConfigError, match=r"data\.path=.*nothing\.jsonl does not exist"):
        rlhpc.start(config, overrides | {"data.path": "nothing.jsonl"}, resume=True)


@pytest.mark.parametrize("task", ["__main__:judge", "both"])
def test_a_reward_function_of_the_session_itself_is_refused_before_anything_is_started(tmp_path, monkeypatch, task):
    monkeypatch.setattr(api, "child_command", None)
    config = load_config(make_lab(tmp_path).run_file("own", run={"name": "own"}))
    overrides = {"data.task": task, "run": {"directory": tmp_path / "runs" / "own"}}
    if task == "both":
        overrides["composite"] = {"both": {"tasks": {"own": "__main__:judge"}, "correct": "own"}}
    with pytest.raises(ConfigError, match=r"__main__:judge'.*legal: judge in a module, mine\.py beside it"):
        rlhpc.start(config, overrides)


def _stands_in(monkeypatch: pytest.MonkeyPatch, program: str) -> list[list[str]]:
    """A program in place of the command; returns the words that it is given."""
    given: list[list[str]] = []

    def command(module: str, *words: str) -> list[str]:
        given.append([module, *words])
        return [sys.executable, "-c", program]

    monkeypatch.setattr(api, "child_command", command)
    monkeypatch.setattr(api, "_refuse_at_once", lambda config, begins: None)
    return given


STARVED = """
import sys
why = "StarvedError: the latest: bad:r_list: not list\\nline 2"
print("starting | waits for generator-0 | 38 s", file=sys.stderr)
print("rlhpc: 8 groups are dropped", file=sys.stderr)
print(f"rlhpc: controller-0 ended with exit status 2: {why}", file=sys.stderr)
print("runs/y: stopped before the first step; `rlhpc run RUN.toml --resume` continues it")
sys.exit(STATUS)
"""


@pytest.mark.starts
@pytest.mark.parametrize(("status", "error"), [(2, ConfigError), (1, RoleFailed)])
def test_an_error_has_the_reason_and_not_what_is_printed_after_it(monkeypatch, status, error):
    _stands_in(monkeypatch, STARVED.replace("STATUS", str(status)))
    told = list[str]()
    with pytest.raises(error) as raised:
        rlhpc.run(ROOT / "configs" / "demo.toml", tell=told.append)
    assert str(raised.value).endswith("StarvedError: the latest: bad:r_list: not list\nline 2")
    assert told[0].startswith("starting")
    assert told[-1].startswith("runs/y: stopped before")


@pytest.mark.starts
def test_an_interrupt_ends_a_run_and_not_the_waiting_for_one(monkeypatch):
    waits = "import time, sys; print('rlhpc: here', file=sys.stderr, flush=True); time.sleep(600)"
    _stands_in(monkeypatch, waits)

    is_waiting = threading.Event()

    def tell(line: str) -> None:
        if line == "rlhpc: here":  # what comes after it is the traceback of an interrupted program
            is_waiting.wait()
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

    def wait() -> None:
        is_waiting.set()
        started.wait()

    started = rlhpc.start(ROOT / "configs" / "demo.toml", tell=tell)
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert not started.done()
    started.stop()
    assert started.done()
    with pytest.raises(KeyboardInterrupt):
        rlhpc.run(ROOT / "configs" / "demo.toml", tell=tell)


@pytest.mark.starts
def test_a_stop_from_python_is_not_told_in_words_of_a_terminal(monkeypatch):
    """The line is the one that a supervisor says (STOPS in test_local_run.py)."""
    asked = "asks the run to stop: the controller finishes its step and saves"
    program = f"""
import signal, sys, time
def stop(*_):
    print("rlhpc: SIGTERM {asked}{SOONER}", file=sys.stderr, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("here", file=sys.stderr, flush=True)
for _ in range(6000):
    time.sleep(0.1)  # a signal just before a sleep is handled after it
"""
    _stands_in(monkeypatch, program)
    told, is_here = list[str](), threading.Event()

    def tell(line: str) -> None:
        told.append(line)
        is_here.set()

    started = rlhpc.start(ROOT / "configs" / "demo.toml", tell=tell)
    is_here.wait()
    started.stop()
    assert told == ["here", f"rlhpc: stop() {asked}"]


@pytest.mark.starts
def test_what_tell_raises_ends_the_telling_and_not_the_run(monkeypatch):
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    _stands_in(monkeypatch, "import sys; sys.stderr.write('a line\\n' * 100_000)")
    rlhpc.run(ROOT / "configs" / "demo.toml", tell=lambda line: print(1 / 0))
    assert [each.exc_type for each in reported] == [ZeroDivisionError]


@pytest.mark.starts
def test_a_check_returns_its_warnings(monkeypatch):
    printed = "print('data        500 records\\nwarning     only 75 prompts differ')"
    given, told = _stands_in(monkeypatch, printed), list[str]()
    demo = ROOT / "configs" / "demo.toml"
    assert rlhpc.check(demo, {"run.seed": 3}, site="site.toml", tell=told.append) == ["only 75 prompts differ"]
    assert given == [["launch.cli", "check", str(demo), "run.seed=3", "--site", "site.toml"]]
    assert told == ["data        500 records", "warning     only 75 prompts differ"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("run.name=x", r"overrides='run\.name=x': legal: a list of texts"),
        (["run.name=x", len], r"overrides: <built-in function len>: legal: a text"),
        ({"run.name": None}, r"overrides: run\.name=None; legal: leave the key out"),
        ({"run.nam": "x"}, r"overrides: run\.nam='x': unknown key"),
        ({"run": {"num_steps": -1}}, r"overrides: run\.num_steps=-1: legal: above 0"),
    ],
)
def test_overrides_are_texts_or_a_dict(overrides, said):
    for function in (rlhpc.run, rlhpc.start, rlhpc.check):
        with pytest.raises(ConfigError, match=said):
            function(ROOT / "configs" / "demo.toml", overrides)


def test_values_of_a_dict_are_what_they_are():
    given = {"run.name": 'a "b"', "data.path": Path("a b"), "run.seed": np.int64(3), "agent.command": ["a", "b=c"]}
    given |= {"trainer.learning_rate": np.float64(1e-5), "model": {"chat_template_kwargs": {"enable thinking": False}}}
    words = ["run.seed=3", 'agent.command=["a", "b=c"]', "trainer.learning_rate=1e-05"]
    words += ['model.chat_template_kwargs={"enable thinking" = false}', 'run.name="a \\"b\\""', 'data.path="a b"']
    assert sorted(words_of(given)) == sorted(words)


def test_settings_in_place_of_a_run_file_and_both_beginnings_are_refused():
    for function in (rlhpc.run, rlhpc.start, functools.partial(rlhpc.submit, site="site.toml")):
        with pytest.raises(ConfigError, match="legal: a run file, or a Config"):
            function({"run": {"name": "x"}})
        with pytest.raises(ConfigError, match="resume=True and fresh=True"):
            function(ROOT / "configs" / "demo.toml", resume=True, fresh=True)


def test_an_option_in_an_error_is_an_argument_unless_it_is_of_a_command_to_type():
    arguments = inspect.signature(rlhpc.submit).parameters | inspect.signature(rlhpc.evaluate).parameters
    said = "use --resume, --fresh to start over; --after 'x y': no; --step 7: no; --ema; `rlhpc run R --resume`"
    meant = "use resume=True, fresh=True to start over; after='x y': no; step=7: no; --ema; `rlhpc run R --resume`"
    assert in_python(said, arguments) == meant


def test_an_export_says_what_is_not_there_in_its_own_words(first, tmp_path):
    with pytest.raises(CheckpointError, match=r"^step=7: .* no such checkpoint; legal: 2$"):
        rlhpc.export(first.layout.root, tmp_path / "out", step=7)
    with pytest.raises(ConfigError, match=r"^dtype=float16; legal: float32, bfloat16$"):
        rlhpc.export(rlhpc.Run(first.layout.root), tmp_path / "out", dtype="float16")
    with pytest.raises(CheckpointError, match=r"no sound checkpoint of step 7; available steps: 2$"):
        rlhpc.evaluate(rlhpc.Run(first.layout.root), tmp_path / "data.jsonl", step=7)


def test_what_this_session_alone_searches_is_searched_by_what_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), "", str(tmp_path / "not-there")])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = import_path().split(os.pathsep)
    assert {str(tmp_path), str(Path.cwd())} - {str(ROOT)} <= {*found}
    assert not {str(tmp_path / "not-there"), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")} & {*found}
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    assert import_path() == str(ROOT)


@pytest.mark.starts
def test_an_evaluation_from_python_is_the_commands_and_two_are_compared(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the rewards of the lab are in tests
    lab = make_lab(tmp_path)
    words, how = ["generation.engine=scripted"], {"run": lab.run_file("like"), "prompts": 3, "samples": 2}
    figures = [rlhpc.evaluate(lab.model, lab.dataset, words, out=tmp_path / out, **how) for out in ("a", "b")]
    assert figures[0]["num_prompts"] == 3
    assert rlhpc.compare(tmp_path / "a", tmp_path / "b")["figures"]["reward"]["difference"]["value"] == 0
    with pytest.raises(ConfigError, match="samples=0; legal: 1 or more"):
        rlhpc.evaluate(lab.model, lab.dataset, samples=0)
    with pytest.raises(ConfigError, match=r"data\.task: missing(.|\n)*legal: run=RUN\.toml"):
        rlhpc.evaluate(lab.model, lab.dataset)


def test_the_page_for_python_runs(tmp_path, monkeypatch):
    first = FirstRun(tmp_path / "made")
    (tmp_path / "runs").mkdir()
    first.layout.root.rename(tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    shown = [block for heading in HEADINGS for block in blocks(PAGE, "python", heading=heading)]
    ours = [block for block in shown if not block.startswith("# needs")]
    has_pandas = importlib.util.find_spec("pandas") is not None
    assert ["run.frame(" in block for block in ours] == [False, False, True]
    for block in ours if has_pandas else ours[:-1]:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["run"].name == "first"  # type: ignore[attr-defined]


def test_every_name_that_the_page_lists_is_there():
    page = PAGE.read_text(encoding="utf-8")
    for name in re.findall(r"`run\.(\w+)", page):
        assert hasattr(rlhpc.Run, name), name
    for name in re.findall(r"`job\.(\w+)", page):
        assert hasattr(RunJob, name), name
    for name in re.findall(r"`started\.(\w+)", page):
        assert hasattr(StartedRun, name) or name == "run", name
    assert {*re.findall(r"^\| `rlhpc\.(\w+)", page, re.MULTILINE)} | {"Run", "submit"} == {*rlhpc.__all__}


# ------------------------------------------------------------------------------------------------------------ jobs


@pytest.fixture
def runs(tmp_path) -> Runs:
    return Runs(tmp_path)


def _ended(layout: object, job_id: int, result: tuple[str, object]) -> None:
    folder = layout.logs / "slurm"  # type: ignore[attr-defined]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{job_id}_0_result.pkl").write_bytes(pickle.dumps(result))


@pytest.mark.starts
def test_the_result_of_a_job_is_the_summary_and_no_pickle_is_read_for_it(runs):
    layout = runs.submitted("first", 4711)
    _ended(layout, 4711, ("success", {"steps": "not this"}))
    layout.summary.write_text('{"steps": 100}')
    job = RunJob(layout.root)
    assert job.done()
    assert job.result() == {"steps": 100}
    assert job.exception() is None
    assert job.run.summary == {"steps": 100}


@pytest.mark.starts
def test_a_run_that_failed_raises_what_its_supervisor_said_last(runs):
    layout = runs.submitted("first", 4711)
    EventLog(layout.job_events("4711"), 0).say("verdict", "given_up: failed too often")
    _ended(layout, 4711, ("error", "…"))
    with pytest.raises(FailedJobError, match="given_up: failed too often; `rlhpc status "):
        RunJob(layout.root).result()


@pytest.mark.starts
def test_a_job_goes_on_in_its_successor(runs):
    layout = runs.submitted("first", 4711)
    job = RunJob(layout.root)
    _ended(layout, 4711, ("error", "close to its time limit"))
    assert job.done()
    runs.job(layout, 4712, "hetjob", follows=4711)
    assert not job.done()
    log = layout.logs / "slurm" / "hetjob-4712.log"
    log.write_text("second life")
    assert job.stdout() == "second life"
    _ended(layout, 4712, ("success", {}))
    assert job.done()


def test_a_run_that_was_never_submitted_is_no_job(first):
    with pytest.raises(RunDirectoryError, match="was it submitted"):
        RunJob(first.layout.root)


def test_what_is_refused_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError):
        rlhpc.submit(ROOT / "configs" / "demo.toml", tmp_path / "no-site.toml", [f"run.directory={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_half_a_surrogate_in_a_text_is_its_escape_in_a_frame(tmp_path):
    run = TextRun(tmp_path / "torn")
    run.seal([run.group("3 + 4 =", [("7", 1.0), ("8", 0.0)], step=0, task="cut \ud83d")])
    columns = _columns(rlhpc.Run.load(run.layout.root).rollouts())
    assert columns["task"] == ["cut \\ud83d", "cut \\ud83d"]


def test_a_fault_of_an_override_is_not_put_down_to_a_command_line(tmp_path):
    site = ROOT / "slurm" / "sites" / "example.toml"
    with pytest.raises(ConfigError) as error:
        rlhpc.submit(ROOT / "configs" / "demo.toml", site, ["run.num_steps=-1", f"run.directory={tmp_path}"])
    assert str(error.value) == "overrides: run.num_steps=-1: legal: above 0"
