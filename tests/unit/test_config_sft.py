"""[[demonstrations]] and [sft]: files of the stage alone, and the stage of an RL run."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.checks.bias import unusual
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config, override, read_resolved, write_resolved
from rlhpc.config.rules import Config, supervised
from rlhpc.protocol.errors import ConfigError
from tests.unit.test_config import RUN_FILE

ALONE = """
[run]
name = "taught"
[model]
path = "model"
[[demonstrations]]
path = "chats.jsonl"
[sft]
batch_size = 8
epochs = 2.0
[trainer]
token_budget = 64
"""


def loaded(directory: Path, text: str, *words: str) -> Config:
    (directory / "run.toml").write_text(text)
    return load_config(directory / "run.toml", words)


def test_a_file_of_the_stage_alone_needs_nothing_of_rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = loaded(tmp_path, ALONE)
    assert config.is_supervised
    assert not config.data
    assert config.demonstrations[0].path == tmp_path / "chats.jsonl"
    assert (config.generation.max_tokens, config.generation.temperature) == (64, 1.0)
    assert (config.admission.groups_per_step, config.admission.group_size) == (8, 1)
    assert loaded(tmp_path, ALONE, "sft.max_tokens=32").generation.max_tokens == 32


def test_settings_of_the_stage_are_those_of_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("sft.learning_rate=3e-4", "sft.warmup_steps=2", "sft.min_learning_rate=1e-5", "lora.rank=4")
    whole = ("algorithm.kl_coefficient=0.1", "trainer.reference_memory=device", "lora.learning_rate=1e-4")
    decay = ("trainer.lr_schedule=linear", "trainer.decay_steps=3")
    before = loaded(tmp_path, RUN_FILE, "demonstrations.path=d.jsonl", *words, *whole, *decay)
    assert not before.is_supervised
    stage = supervised(before, 1000)
    assert stage.is_supervised
    assert (stage.run.name, stage.run_directory) == ("small-sft", tmp_path / "runs" / "small-sft")
    assert stage.run.num_steps == 16  # 1000 conversations, 64 in a step
    trainer = stage.trainer
    assert (trainer.learning_rate, trainer.warmup_steps, trainer.min_learning_rate) == (3e-4, 2, 1e-5)
    assert (trainer.lr_schedule, trainer.decay_steps, trainer.token_budget) == ("cosine", None, 64)
    assert stage.stepped.learning_rate == 3e-4
    assert stage.lora.rank == 4
    assert (stage.data, stage.algorithm) == ((), Config.model_fields["algorithm"].default)
    assert supervised(stage, 1000) == stage  # a name ends in -sft once
    assert supervised(override(before, ["sft.num_steps=7"]), 1000).run.num_steps == 7
    assert supervised(loaded(tmp_path, ALONE), 21).run.num_steps == 6  # 42 conversations, 8 in a step
    write_resolved(stage, RunLayout(tmp_path), "abc")
    assert read_resolved(RunLayout(tmp_path))[0] == stage


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("run.num_steps=4", "run.num_steps=4: legal: sft.num_steps, or sft.epochs"),
        ("demonstrations=[]", "sft.batch_size=8 has no effect without demonstrations.path; legal: 64, its default, or"),
        ("demonstrations.held_out=true", "demonstrations.held_out=true in all tables: nothing is learnt from"),
        ("demonstrations.prompt_template={q}", "no effect without demonstrations.completion_field"),
        ("sft.max_tokens=65", "sft.max_tokens=65 with trainer.token_budget=64; legal: 2 to 64"),
        (
            "sft.beta=0.2",
            "sft.beta=0.2 has no effect with sft.loss='cross_entropy'; legal: 0.1, its default, or sft.loss='dpo'",
        ),
        ("sft.loss=dpo", "demonstrations.rejected_field='' with sft.loss='dpo'; legal: the worse answer's field"),
        (
            "demonstrations.rejected_field=no",
            "demonstrations.rejected_field='no' has no effect without demonstrations.c",
        ),
        (
            "demonstrations={path='d',completion_field='a',rejected_field='b'}",
            "demonstrations.rejected_field='b' has no effect with sft.loss='cross_entropy'",
        ),
        (
            "demonstrations={path='d',completion_field='a',prompt_field='a'}",
            "demonstrations.prompt_field='a' with demonstrations.completion_field='a': it is the same",
        ),
        ("num_train_epochs=3", "(did you mean sft.epochs?)"),
        ("trainer.per_device_train_batch_size=3", "(did you mean sft.batch_size? conversations"),
        ("trainer.beta=3", "(did you mean sft.beta?)"),
        ("sft.min_learning_rate=0.1", "sft.min_learning_rate=0.1 is above sft.learning_rate=1e-05"),
        ("sft.early_stop=2", "sft.early_stop=2 has no effect with sft.held_out=0 and demonstrations.held_out=false"),
        ("rewards.timeout_s=4.0", "[rewards] has no effect with run.stage='sft'; legal: to leave it out"),
        ("trainer.learning_rate=1e-4", "trainer.learning_rate=0.0001 has no effect with run.stage='sft'; legal: sft."),
        ("lora={rank=2,learning_rate=0.001}", "lora.learning_rate=0.001 has no effect with run.stage='sft'"),
        (
            "generation.max_prompt_tokens=4",
            "command line: [generation] has no effect in a file of supervised fine-tuni",
        ),
        (
            "data.path=d",
            "command line: [data] has no effect in a file of supervised fine-tuning alone; legal: to leave",
        ),
        ("data={path='d',task='exact',split=''}", "or all of [data], [generation] and [admission], of a run that goes"),
    ],
)
def test_what_has_no_effect_in_the_stage_is_refused(tmp_path: Path, word: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        loaded(tmp_path, ALONE, word)
    assert said in str(refusal.value)


def test_unusual_values_of_the_stage_are_named_by_its_own_keys(tmp_path: Path) -> None:
    words = ("sft.learning_rate=0.1", "sft.warmup_steps=1", "trainer.max_grad_norm=1e9")
    stage = supervised(loaded(tmp_path, ALONE, *words), 10_000_000)
    said = [line.partition("=")[0] for line in unusual(stage)]
    assert said == ["sft.learning_rate", "trainer.max_grad_norm"]


def test_the_stage_of_an_rl_run_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft\.warmup_steps=9 is more than its 6 steps; legal: 0 to 6"):
        supervised(loaded(tmp_path, ALONE, "sft.warmup_steps=9"), 21)
    with pytest.raises(ConfigError, match=r"sft\.batch_size=4 has no effect without demonstrations\.path; legal: 64"):
        loaded(tmp_path, RUN_FILE, "sft.batch_size=4")
    with pytest.raises(ConfigError, match=r"demonstrations=\[\]: legal: 1 or more"):
        loaded(tmp_path, ALONE.replace("batch_size = 8\nepochs = 2.0", ""), "demonstrations=[]")
    with pytest.raises(
        ConfigError, match=r"run\.stage='sft' without a table \[\[demonstrations\]\]; legal: one, or no"
    ):
        loaded(tmp_path, RUN_FILE, "run.stage='sft'")
    with pytest.raises(ConfigError, match=r"\[admission\]: missing; required in it: groups_per_step"):
        loaded(tmp_path, ALONE, "generation.max_prompt_tokens=4", "data={path='d',task='exact'}")  # meant to be RL


def test_preferences_have_a_reference_and_both_of_a_pair_fit_a_row(tmp_path: Path) -> None:
    pairs = "demonstrations={path='d',completion_field='chosen',rejected_field='rejected',prompt_template=''}"
    words = (pairs, "sft.loss=dpo", "trainer.reference_memory=device")
    config = loaded(tmp_path, ALONE, *words)
    assert (config.longest_conversation, config.sft.beta, config.has_reference) == (32, 0.1, True)
    assert supervised(config, 8).trainer.reference_memory == "device"
    assert not loaded(tmp_path, ALONE).has_reference
    with pytest.raises(
        ConfigError, match=r"demonstrations\.use_chat_template=true has no effect with prompt_template=''"
    ):
        loaded(tmp_path, ALONE, *words, "demonstrations.use_chat_template=true")
    same = r"demonstrations\.rejected_field='chosen' with demonstrations\.completion_field='chosen': it is the same"
    with pytest.raises(ConfigError, match=same):
        loaded(tmp_path, ALONE, *words, "demonstrations.rejected_field=chosen")
    with pytest.raises(ConfigError, match=r"sft\.max_tokens=33 with trainer\.token_budget=64; legal: 2 to 32"):
        loaded(tmp_path, ALONE, *words, "sft.max_tokens=33")
    before = loaded(tmp_path, RUN_FILE, *words, "algorithm.kl_coefficient=0.0")
    assert not before.has_reference  # of RL
    assert supervised(before, 8).has_reference
