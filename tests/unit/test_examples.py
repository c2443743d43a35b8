"""The programs of examples/ run and say what is true."""

from __future__ import annotations

import random
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from rlhpc.metrics.names import find_metric
from rlhpc.metrics.tensorboard import Recorder
from rlhpc.rewards.registry import resolve
from tests.unit.doc_pages import ROOT

EXAMPLES = ROOT / "examples"
REFERENCE = "7 + 5 = 12\n12 - 3 = 9\n#### 9"


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize(
    ("completion", "reward", "is_correct"),
    [
        (REFERENCE, 1.2, True),
        ("#### 9", 1.0, True),
        ("7 + 5 = 13\n13 - 3 = 10\n#### 10", 0.1, False),
        ("7 + 5 = 12\n12 - 3 = 9", 0.2, False),
        ("nine", 0.0, False),
        ("7 + 5 = 12\n12 3 3 = 9\n#### 9", 1.1, True),  # no sum: not passed over
        ("9 = 9\n#### 9", 1.0, True),
        ("2 + 3 + 4 = 9, and 4 x 3 - 3 = 9\n#### 9", 1.2, True),
        ("Half of $1,200 is 1,200/2 = $<<1200/2=600>>600, and 1/0 = 0.\n#### 600", 0.1, False),
    ],
)
def test_the_example_reward_pays_the_answer_and_a_little_for_true_equations(
    completion: str, reward: float, is_correct: bool
) -> None:
    outcome = resolve("worked_answer:reward")(completion, REFERENCE)
    assert outcome.reward == pytest.approx(reward)
    assert outcome.is_correct == is_correct
    assert sum(outcome.parts.values()) == pytest.approx(reward)


@pytest.mark.parametrize("name", ["reward", "first_try"])
@pytest.mark.parametrize("number", range(3))
def test_a_sum_without_an_end_is_no_working_and_no_error(name: str, number: int) -> None:
    """What a policy writes must not end a judgement: that counts as the fault of the verifier, and teaches nothing."""
    endless = ("-" * 5000 + "9 + 0", "1 + " * 3000 + "1", "9" * 400 + " + 1")[number]
    outcome = resolve(f"worked_answer:{name}")(f"{endless} = 9\n#### 9", "9")
    assert (outcome.reward, outcome.is_correct) == (1.0, True)


def test_the_hole_of_the_first_try_is_the_one_that_the_tutorial_finds() -> None:
    without_a_minus = "7 + 5 = 12\n12 3 3 = 9\n#### 9"
    assert resolve("worked_answer:first_try")(without_a_minus, "9").reward == pytest.approx(1.2)
    assert resolve("worked_answer:reward")(without_a_minus, "9").reward == pytest.approx(1.1)


def test_the_example_reward_raises_where_the_reference_has_no_answer() -> None:
    with pytest.raises(ValueError, match="reference"):
        resolve("worked_answer:reward")("#### 9", "")


def test_word_problems_are_right_when_they_are_not_careless_and_survive_the_tokenizer() -> None:
    import word_problems

    tokenizer = word_problems.make_tokenizer()
    reward = resolve("worked_answer:reward")
    for record in word_problems.draw_records(200, seed=3):
        answer = record["extra_info"]["answer"]
        assert reward(answer, record["reward_model"]["ground_truth"]).reward == pytest.approx(1.2)
        prompt = word_problems.TEMPLATE.format(question=record["prompt"][0]["content"])
        asked = tokenizer.apply_chat_template(record["prompt"], tokenize=False, add_generation_prompt=True)
        assert asked == prompt  # the model was taught by the one, and is asked by the other
        text = f"{prompt} {answer}"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.unk_token_id not in tokenizer.encode(text)


@pytest.mark.parametrize("name", ["word_problems", "echo_agent", "draw_charts"])
def test_an_example_that_is_asked_for_help_says_what_it_takes_and_writes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert (end.value.code, list(tmp_path.iterdir())) == (0, [])
    assert "DIRECTORY" in (said := capsys.readouterr().out) or "RUN_DIR OUT.png" in said


def test_careless_answers_are_often_wrong_and_never_beyond_the_vocabulary() -> None:
    import word_problems

    rng = random.Random(0)
    tokenizer = word_problems.make_tokenizer()
    reward = resolve("worked_answer:reward")
    right = 0
    for _ in range(500):
        _, *numbers = word_problems.draw_problem(rng)
        clean = word_problems.write_answer(*numbers, rng, slips=0.0, no_mark=0.0)
        careless = word_problems.write_answer(*numbers, rng, slips=1.0, no_mark=0.5)
        assert tokenizer.unk_token_id not in tokenizer.encode(careless)
        right += reward(careless, clean).is_correct
    assert right < 250


def test_the_example_loss_passes_its_own_checks_and_is_tapered(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_loss.py"))
    assert capsys.readouterr().out.splitlines()[0] == "tapered [1.0, 1.0, -1.0, -0.5]"


def test_the_reading_example_reads_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import word_problems

    (tmp_path / "rollouts").mkdir()
    shutil.copy(ROOT / "tests/unit/buffer/golden_segment.h5", tmp_path / "rollouts" / "segment_000000.h5")
    word_problems.make_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(sys, "argv", ["read_segments.py", str(tmp_path), str(tmp_path / "model")])
    runpy.run_path(str(EXAMPLES / "read_segments.py"))
    printed = capsys.readouterr().out
    assert printed.startswith("12 groups, 3 trained")
    assert "groups by staleness: {" in printed


def test_the_charts_are_drawn_from_what_a_run_writes_and_what_is_missing_is_said(tmp_path: Path) -> None:
    import draw_charts

    recorder = Recorder(tmp_path / "tensorboard", wall_clock=lambda: 1000.0)
    for step in range(3):
        recorder.step(step, {"reward/mean": 0.1 * step, "staleness/max": 1.0})
    recorder.close()
    scalars = draw_charts.read_scalars(tmp_path)
    assert scalars["reward/mean"][0] == [0, 1, 2]
    assert scalars["reward/mean"][1] == pytest.approx([0.0, 0.1, 0.2])
    missing = draw_charts.draw(scalars, tmp_path / "charts.png")
    assert (tmp_path / "charts.png").read_bytes().startswith(b"\x89PNG")
    assert "trainer/entropy" in missing
    assert "reward/mean" not in missing


def test_the_charts_have_names_that_runs_write() -> None:
    import draw_charts

    for name in (name for names in draw_charts.CHARTS.values() for name in names):
        find_metric(name)


def test_the_picture_of_the_ring_is_what_its_program_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "pictures" / "ring.py"))["draw"]()
    assert drawn == (ROOT / "docs" / "pictures" / "ring.svg").read_text(encoding="utf-8"), (
        "docs/pictures/ring.svg is behind; python docs/pictures/ring.py draws it anew"
    )
