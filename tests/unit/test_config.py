"""Run files in, Config out: what overrides do, what is written for the roles, what the slots amount to."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from pydantic_core import to_json

from launch.commands.schema import meaning_of
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import config_hash, load_config, override, read_resolved, sections, write_resolved
from rlhpc.config.rules import Config
from rlhpc.config.tables import NO_WINDOW
from rlhpc.protocol.errors import ConfigError

GAE = ("algorithm.advantage=gae", "admission.active_sampling=false")
RUN_FILE = """
[run]
name = "small"
num_steps = 4
[model]
path = "model"
[data]
path = "data/train.jsonl"
task = "integer_arithmetic"
[generation]
max_prompt_tokens = 8
max_completion_tokens = 8
[admission]
groups_per_step = 2
group_size = 2
[trainer]
token_budget = 64
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


def test_relative_paths_are_meant_from_where_the_command_is_given(run_file: Path, tmp_path: Path) -> None:
    config = load_config(run_file)
    assert config.model.path == tmp_path / "model"
    assert config.data[0].path == tmp_path / "data/train.jsonl"
    assert config.run_directory == tmp_path / "runs/small"


@pytest.mark.parametrize(
    ("word", "section", "key", "value"),
    [
        ("run.num_steps=9", "run", "num_steps", 9),
        ("run.num_steps = 9", "run", "num_steps", 9),
        ("trainer.learning_rate=2e-6", "trainer", "learning_rate", 2e-6),
        ("model.dtype=float32", "model", "dtype", "float32"),
        ('model.dtype="float32"', "model", "dtype", "float32"),
        ("transport.curve=false", "transport", "curve", False),  # a section that the file does not have
        ("data.prompt_template=Q: {q} = ", "data", "prompt_template", "Q: {q} ="),
        ('data.prompt_template="a=b {q}\\n"', "data", "prompt_template", "a=b {q}\n"),
        ("run.name=7b", "run", "name", "7b"),
    ],
)
def test_an_override_replaces_one_key(run_file: Path, word: str, section: str, key: str, value: object) -> None:
    table = getattr(load_config(run_file, [word]), section)
    assert getattr(table[0] if isinstance(table, tuple) else table, key) == value


def test_the_last_override_of_a_key_counts(run_file: Path) -> None:
    assert load_config(run_file, ["run.num_steps=5", "run.num_steps=6"]).run.num_steps == 6


def test_a_config_is_frozen(run_file: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(run_file).run.num_steps = 5  # type: ignore[misc]


def test_roles_read_what_the_launcher_wrote_to_the_last_digit(run_file: Path, tmp_path: Path) -> None:
    config = load_config(run_file, ["trainer.learning_rate=1.2345678901234567e-7"])
    write_resolved(config, RunLayout(tmp_path), "abc")
    assert read_resolved(RunLayout(tmp_path)) == (config, config_hash(config))
    assert json.loads((tmp_path / "config.json").read_bytes())["commit"] == "abc"


def test_settings_that_were_altered_by_hand_are_refused(run_file: Path, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    write_resolved(load_config(run_file), layout, "")
    layout.config.write_text(layout.config.read_text().replace('"num_steps": 4', '"num_steps": 5'))
    with pytest.raises(ConfigError, match="altered since the run was started"):
        read_resolved(layout)
    for text, said in (
        ("{}", "has no 'config'.* is not a run directory"),
        ('{"config": {}}', "has no 'hash'.* is not a run directory"),
        *((text, "damaged") for text in ("{", "[]", '{"config": "x", "hash": ""}', '{"config": ["x"], "hash": ""}')),
    ):
        layout.config.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_resolved(layout)


def test_settings_with_keys_of_a_later_version_name_that_version(run_file: Path, tmp_path: Path) -> None:
    """The file is not damaged: login and compute nodes have environments of their own."""
    layout = RunLayout(tmp_path)
    write_resolved(load_config(run_file), layout, "v9-4-gabc")
    document = json.loads(layout.config.read_bytes())
    document["config"]["run"]["of_tomorrow"] = 1
    layout.config.write_text(
        json.dumps(document | {"hash": hashlib.sha256(to_json(document["config"])).hexdigest()[:16]})
    )
    with pytest.raises(ConfigError) as caught:
        read_resolved(layout)
    unknown, by_whom = str(caught.value).splitlines()
    assert "run.of_tomorrow=1: unknown key" in unknown
    assert by_whom == f"{layout.config}: written by another version of rlhpc, v9-4-gabc: go on with that one"
    layout.config.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="unknown key") as caught:
        read_resolved(layout)
    assert "another version" not in str(caught.value)


def test_the_hash_is_of_all_settings(run_file: Path) -> None:
    plain = config_hash(load_config(run_file))
    assert plain == config_hash(load_config(run_file, ["run.num_steps=4"]))
    assert plain != config_hash(load_config(run_file, ["buffer.segment_groups=3"]))


@pytest.mark.parametrize("groups_per_step", [1, 2, 5, 16])
@pytest.mark.parametrize("max_staleness", [0, 1, 3, 8])
def test_slots_are_those_of_the_batches_that_the_bound_allows(
    run_file: Path, groups_per_step: int, max_staleness: int
) -> None:
    """One slot more would break the bound (test_ledger_properties.py); a window takes none of them."""
    for window in (None, 1, 7):
        words = [f"admission.groups_per_step={groups_per_step}", f"admission.max_staleness={max_staleness}"]
        words += [f"admission.window_groups={window}"] if window else []
        assert load_config(run_file, words).admission.num_slots == (max_staleness + 1) * groups_per_step


def test_batches_may_pass_stragglers_unless_that_is_ruled_out(run_file: Path) -> None:
    for words, window in (
        ([], NO_WINDOW),
        (["admission.window_groups=3"], 3),
        (["admission.window_groups=1"], 1),
        (["run.deterministic=true"], 1),
    ):
        assert load_config(run_file, words).window_groups == window


@pytest.mark.parametrize(
    ("words", "refused", "way_out"),
    [
        (["algorithm.clip_low=0.1"], "algorithm.clip_low=0.1", ["algorithm.proximal=behaviour"]),
        (["algorithm.clip_high=0.3", "algorithm.proximal=recompute"], "algorithm.clip_high=0.3",
         ["algorithm.clip_high=0.28"]),
        (["algorithm.importance_cap=5.0", "algorithm.proximal=behaviour"], "algorithm.importance_cap=5",
         ["algorithm.importance_cap=off"]),
        (["algorithm.clip_low=0.1", "algorithm.proximal=recompute"], "algorithm.clip_low=0.1",
         ["algorithm.minibatches=2"]),
        (["algorithm.dual_clip=3.0"], "algorithm.dual_clip=3", ["algorithm.proximal=behaviour"]),
        (["algorithm.dual_clip=3.0", "algorithm.loss=cispo", "algorithm.proximal=behaviour"], "algorithm.dual_clip=3",
         ["algorithm.loss=ppo"]),
        (["algorithm.clip_high=0.3", "algorithm.loss=reinforce", "algorithm.proximal=loglinear"],
         "algorithm.clip_high=0.3", ["algorithm.loss=cispo"]),
        (["algorithm.sapo_tau_negative=2.0", "algorithm.proximal=behaviour"], "algorithm.sapo_tau_negative=2",
         ["algorithm.loss=sapo"]),
        (["algorithm.loss=mine:loss", "algorithm.importance_cap=5.0"], "algorithm.importance_cap=5",
         ["algorithm.importance_cap=off"]),
        (["algorithm.loss=mine:loss", "algorithm.veto_below=1e-4"], "algorithm.veto_below=0.0001",
         ["algorithm.loss=cispo"]),
        (["algorithm.loss=mine:loss", "algorithm.proximal=loglinear"], "algorithm.proximal='loglinear'",
         ["algorithm.proximal=recompute"]),
        (["algorithm.pass_k=2"], "algorithm.pass_k=2", ["algorithm.advantage=pass_at_k", "admission.group_size=4"]),
        (["algorithm.advantage=reinforce_pp_baseline", "algorithm.advantage_normalization=task"],
         "algorithm.advantage_normalization='task'", ["algorithm.advantage=rloo"]),
        (["algorithm.veto_below=1e-4", "algorithm.proximal=behaviour"], "algorithm.veto_below=0.0001",
         ["algorithm.proximal=recompute"]),
        (["algorithm.kl_importance=true"], "algorithm.kl_importance=true", ["algorithm.kl_coefficient=0.01"]),
        (["algorithm.kl_importance=true", "algorithm.kl_coefficient=0.01", "algorithm.kl_in=reward",
          "algorithm.kl_estimator=k1", *GAE], "algorithm.kl_importance=true",
         ["algorithm.kl_in=loss", "algorithm.kl_estimator=k2"]),
        (["algorithm.veto_drift_above=0.5", "algorithm.proximal=behaviour"], "algorithm.veto_drift_above=0.5",
         ["algorithm.proximal=recompute"]),
        (["algorithm.mask_above=5.0", "algorithm.proximal=behaviour"], "algorithm.mask_above=5",
         ["algorithm.proximal=loglinear"]),
        (["algorithm.kl_estimator=k2"], "algorithm.kl_estimator='k2'", ["algorithm.kl_coefficient=0.01"]),
        (["algorithm.kl_in=reward", *GAE, "algorithm.kl_estimator=k3"], "algorithm.kl_in='reward'",
         ["algorithm.kl_coefficient=0.01"]),
        (["algorithm.reference_every=8"], "algorithm.reference_every=8", ["algorithm.kl_coefficient=0.01"]),
        (["trainer.reference_memory=device"], "trainer.reference_memory='device'", ["algorithm.kl_coefficient=0.01"]),
        (["trainer.reference_memory=device", "algorithm.kl_coefficient=0.01", "trainer.backend=deepspeed",
          "trainer.zero_stage=3", "trainer.parameter_offload=true"], "trainer.reference_memory='device'",
         ["trainer.parameter_offload=false"]),
        (["algorithm.scale_rate_by_age=true", "admission.max_staleness=1"], "algorithm.scale_rate_by_age=true",
         ["admission.max_staleness=2"]),
        (["shaping.overlong_penalty=2.0"], "shaping.overlong_penalty=2", ["shaping.overlong_tokens=1"]),
        (["shaping.variance=shaped"], "shaping.variance='shaped'", ["shaping.length_weight=-0.1"]),
        (["algorithm.max_token_age=1", "admission.max_staleness=1"], "algorithm.max_token_age=1",
         ["algorithm.max_token_age=0"]),
        (["curriculum.solved_at=0.9"], "curriculum.solved_at=0.9", ["curriculum.solved_rest_epochs=1"]),
        (["curriculum.hopeless_at=0.1"], "curriculum.hopeless_at=0.1", ["curriculum.hopeless_rest_epochs=1"]),
        (["curriculum.min_chance=0.2"], "curriculum.min_chance=0.2", ["curriculum.target_pass_rate=0.5"]),
        (["curriculum.newest_weight=0.2"], "curriculum.newest_weight=0.2", ["curriculum.target_pass_rate=0.5"]),
        (["curriculum.pass_chance=0.5"], "curriculum.pass_chance=0.5", ["curriculum.max_group_size=64"]),
        (["curriculum.stage_groups=8"], "curriculum.stage_groups=8", ["curriculum.stages=[1.0, 2.5]"]),
        (["generation.gpu_memory_utilization=0.5", "generation.kv_cache_bytes=1_000_000"],
         "generation.gpu_memory_utilization=0.5", ["generation.gpu_memory_utilization=0.9"]),
        (["generation.recompute_kv=true", "admission.max_staleness=0"], "generation.recompute_kv=true",
         ["admission.max_staleness=1"]),
        (["generation.seeded_samples=true", "run.deterministic=true"], "generation.seeded_samples=true",
         ["run.deterministic=false"]),
        (["generation.recompute_kv=true", "run.deterministic=true"], "generation.recompute_kv=true",
         ["run.deterministic=false"]),
        (["trainer.min_learning_rate=1e-7"], "trainer.min_learning_rate=1e-07", ["trainer.lr_schedule=cosine"]),
        (["trainer.ema_memory=device"], "trainer.ema_memory='device'", ["trainer.ema_decay=0.9"]),
        (["trainer.decay_steps=3"], "trainer.decay_steps=3", ["trainer.lr_schedule=cosine"]),
        (["trainer.decay_tokens=300"], "trainer.decay_tokens=300", ["trainer.lr_schedule=linear"]),
        (["trainer.decay_hours=1.5"], "trainer.decay_hours=1.5", ["trainer.lr_schedule=linear"]),
        (["critic.follows_schedule=true", "trainer.warmup_steps=1", "admission.active_sampling=false"],
         "critic.follows_schedule=true", ["algorithm.advantage=gae"]),
        (["critic.follows_schedule=true", *GAE], "critic.follows_schedule=true",
         ["trainer.warmup_steps=1"]),
        (["instructions.accuracy=loose"], "instructions.accuracy='loose'", ["data.task=instruction_following"]),
        (["instructions.reward=fraction"], "instructions.reward='fraction'", ["data.task=instruction_following"]),
        (["weights.full_every=9", "weights.delta=off"], "weights.full_every=9", ["weights.delta=auto"]),
        (["weights.full_every=9", "weights.transport=nccl"], "weights.full_every=9", ["weights.transport=gloo"]),
        (["weights.full_every=9", "model.dtype=float32"], "weights.full_every=9", ["model.dtype=bfloat16"]),
        (["trainer.overlap_grad_reduce=true"], "trainer.overlap_grad_reduce=true", ["trainer.num_ranks=2"]),
        (["buffer.partial_interval_s=30.0", "admission.lease_deadline_s=80.0"], "buffer.partial_interval_s=30",
         ["buffer.partial_interval_s=20.0"]),
    ],
)  # fmt: skip
def test_a_key_that_does_nothing_beside_the_others_is_refused_with_a_way_out(
    run_file: Path, words: list[str], refused: str, way_out: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(run_file, words)
    (line,) = str(error.value).splitlines()
    assert line.startswith(
        (f"command line: {refused} has no effect with ", f"command line: {refused} has no effect without ")
    )
    assert "; legal: " in line
    load_config(run_file, [*words, *way_out])


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("learning_rate=1e-5", "trainer.learning_rate or critic.learning_rate"),
        ("trainer.temperature=0.5", "generation.temperature or evaluation.temperature"),
        ("trainer.lerning_rate=1e-5", "learning_rate"),
        ("data.taks=math_answer", "task"),
        ("run.temperatures=0.5", "generation.temperature or evaluation.temperature"),
    ],
)
def test_a_key_in_the_wrong_table_is_answered_with_the_right_ones(run_file: Path, word: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"\(did you mean {re.escape(meant)}\?\)(; legal: |$)"):
        load_config(run_file, [word])


@pytest.mark.parametrize(
    ("word", "whose"),
    [
        ("x.y=1", "command line: [x]: "),
        ("trainer.lerning_rate=1", "command line: trainer.lerning_rate=1: unknown key"),
        ("run.num_steps=many", "command line: run.num_steps='many': legal: "),
        ("run=3", "command line: run=3: legal: "),
        ("environment=x:y", "command line: environment='x:y': legal: a table (did you mean data.environment?)"),
        ("data.0.weight=-1", "command line: data.weight=-1: legal: "),
        ("generation.top_p=0.5", "command line: generation.top_p=0.5: unknown key"),
        ("trainer.warmup_steps=500", "command line: trainer.warmup_steps=500 is more than run.num_steps="),
        ("run.num_steps=1", "{run_file} and command line: trainer.warmup_steps=2 is more than run.num_steps=1"),
        ("run.seed=3", "{run_file}: [trainr]: "),
        ("trainr.device=3", "{run_file}: [trainr]: "),
        ("trainer.decay_steps=1", "{run_file}: [trainr]: "),
    ],
)
def test_a_fault_is_put_down_to_whoever_brought_the_key(run_file: Path, word: str, whose: str) -> None:
    text = run_file.read_text().replace("[data]", "[[data]]").replace("[trainer]", "[trainer]\nwarmup_steps = 2")
    run_file.write_text(text + ("[trainr]\nbackend = 3\n" if "trainr" in whose else ""))
    with pytest.raises(ConfigError) as error:
        load_config(run_file, [word])
    assert str(error.value).startswith(whose.replace("{run_file}", str(run_file)))


def test_a_key_that_every_run_file_needs_is_missing_in_the_run_file(run_file: Path) -> None:
    lines = run_file.read_text().splitlines()
    without = [line for line in lines if not line.startswith("token_budget")]
    assert len(without) == len(lines) - 1
    run_file.write_text("\n".join(each for each in without if each != "[trainer]"))
    with pytest.raises(ConfigError) as error:
        load_config(run_file, ["trainer.device=cpu"])
    assert f"{run_file}: trainer.token_budget: missing; it has no default" in str(error.value)
    with pytest.raises(ConfigError, match=r"^command line: evaluation\.path: missing"):
        load_config(run_file, ["trainer.token_budget=99", "evaluation.prompts=3"])


def test_of_a_key_that_is_set_twice_the_last_value_holds(run_file: Path) -> None:
    assert load_config(run_file, ["run.seed=1", "run.num_steps=3", "run.seed=2"]).run.seed == 2


def test_a_name_is_told_in_words_what_it_may_be(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.name=.a/b.: legal: letters, digits, .*, a letter or digit first"):
        load_config(run_file, ["run.name=a/b"])


def test_a_mark_at_the_head_of_a_file_is_no_fault(run_file: Path) -> None:
    before = load_config(run_file)
    run_file.write_bytes(b"\xef\xbb\xbf" + run_file.read_bytes())
    assert load_config(run_file) == before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["curriculum.stages=[1.0, 1.0]"], r"curriculum.stages=\[1.0, 1.0\] must ascend"),
        (
            [*(f"curriculum.{kind}{key}" for kind in ("solved", "hopeless") for key in ("_at=0.5", "_rest_epochs=1"))],
            "curriculum.hopeless_at=0.5 is not below curriculum.solved_at=0.5",
        ),
        (["curriculum.stages=hard"], "curriculum.stages"),
        (
            ["curriculum.max_group_size=1"],
            r"curriculum.max_group_size=1 is not above admission.group_size=\d+.*legal: ",
        ),
    ],
)
def test_a_curriculum_that_contradicts_itself_is_refused(run_file: Path, words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(run_file, words)


def test_an_average_that_no_checkpoint_would_hold_or_that_nobody_keeps_is_refused(run_file: Path) -> None:
    words = ["trainer.ema_decay=0.99", "trainer.backend=megatron", "checkpoint.trainer_format=megatron"]
    with pytest.raises(ConfigError, match=r"trainer_format='megatron' with trainer.ema_decay=0.99: .*legal: 'hf'"):
        load_config(run_file, words)
    run_file.write_text(RUN_FILE + '[evaluation]\npath = "held_out.jsonl"\nema = true\n')
    with pytest.raises(
        ConfigError, match=r"evaluation.ema=true has no effect with trainer.ema_decay='off'; legal: .*0.99"
    ):
        load_config(run_file)
    load_config(run_file, ["trainer.ema_decay=0.99"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["decay_steps=3", "decay_hours=2.0"],
            "trainer.decay_steps=3 and trainer.decay_hours=2: the learning rate falls",
        ),
        (["decay_steps=2", "warmup_steps=2"], "decay_steps=2 ends before warm-up, .*warmup_steps=2; legal: 3 or more"),
        (["decay_hours=2.0", "run.deterministic=true"], "run.deterministic=true with trainer.decay_hours=2: .*legal: "),
        (["decay_tokens=0"], "trainer.decay_tokens=0"),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(run_file: Path, words: list[str], text: str) -> None:
    words = [
        "trainer.lr_schedule=linear",
        *(word if "." in word.split("=")[0] else f"trainer.{word}" for word in words),
    ]
    with pytest.raises(ConfigError, match=text):
        load_config(run_file, words)


TWO_DATASETS = """
[[data]]
path = "data/math.jsonl"
task = "math_answer"
weight = 3
[[data]]
path = "data/sums"
task = "integer_arithmetic"
max_prompt_tokens = 4
max_completion_tokens = 5
"""


@pytest.fixture
def mixed_file(run_file: Path) -> Path:
    table = RUN_FILE.partition("[data]")[2].partition("[generation]")[0]
    run_file.write_text(RUN_FILE.replace(f"[data]{table}", TWO_DATASETS))
    return run_file


def test_several_datasets_have_names_weights_and_limits(mixed_file: Path, tmp_path: Path) -> None:
    config = load_config(mixed_file)
    assert [(each.title, each.weight) for each in config.data] == [("math", 3.0), ("sums", 1.0)]
    assert [each.path for each in config.data] == [tmp_path / "data/math.jsonl", tmp_path / "data/sums"]
    assert [config.dataset_of(prompt_id).title for prompt_id in range(4)] == ["math", "sums", "math", "sums"]
    assert [config.max_completion_tokens(prompt_id) for prompt_id in (6, 7)] == [8, 5]
    write_resolved(config, RunLayout(tmp_path), "abc")
    assert read_resolved(RunLayout(tmp_path)) == (config, config_hash(config))
    assert override(config, ["data.1.name=easy"]).data[1].title == "easy"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.task=x", "'data.task=x': there are 2 tables [[data]]; legal: data.0.…, data.1.…"),
        ("data.2.task=x", "'data.2.task=x': there are 2 tables [[data]]; legal: data.0.…, data.1.…"),
        ("data.1.name=math", "data.0 and data.1 are both called 'math'; give one of them another name"),
        ("data.1.weight=0", "data.1.weight=0: legal: above 0"),
        ("data.1.share=2", "data.1.share=2: unknown key; legal: path, split, source"),
        ("data.0.max_prompt_tokens=9", "data.0.max_prompt_tokens=9 is above generation.max_prompt_tokens=8"),
        ("data.1.name=two words", "data.1.name='two words': legal: letters, digits, '.', '_' and '-'"),
        (
            "data.1.system_prompt=Hi",
            "data.1.system_prompt='Hi' has no effect with data.1.use_chat_template=false and no data.1.prompt_field",
        ),
        (
            "data.1.task_field=kind",
            "data.1.task_field='kind' has no effect without data.1.tasks: the field's values, and",
        ),
        ("data.1.tasks={a='regex'}", "data.1.tasks={a = 'regex'} has no effect without data.1.task_field; legal: "),
    ],
)
def test_a_fault_of_one_of_several_datasets_is_put_down_to_it(mixed_file: Path, word: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(mixed_file, [word])
    assert said in str(error.value)


@pytest.mark.parametrize("header", ["[data]", "[[data]]"])
def test_the_only_dataset_has_the_number_0_and_no_other_however_it_is_written(run_file: Path, header: str) -> None:
    run_file.write_text(run_file.read_text().replace("[data]", header))
    assert load_config(run_file, ["data.0.weight=2"]).data[0].weight == 2
    for word, said in {
        "data.1.weight=2": "'data.1.weight=2': there is but one table [data]; legal: data.…",
        "data.0.weight=0": "command line: data.weight=0: legal: above 0.0",
    }.items():
        with pytest.raises(ConfigError) as error:
            load_config(run_file, [word])
        assert str(error.value) == said


@pytest.mark.parametrize("key", ["evaluation.path", "evaluation.0.path"])
def test_settings_without_an_evaluation_get_one_from_an_override(run_file: Path, key: str) -> None:
    begun = load_config(run_file)
    assert [each.title for each in override(begun, [f"{key}=held-out.jsonl"]).evaluation] == ["held-out"]


def test_a_template_and_a_prompt_field_are_two_prompts(run_file: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"data\.prompt_template='\{q\}' has no effect with data\.prompt_field='p': the prompt is the field",
    ):
        load_config(run_file, ["data.prompt_field=p", "data.prompt_template='{q}'"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.source=reasoning_gym:a"], "data.path='"),
        (
            ["data.size=5"],
            "data.size=5 has no effect without data.source; legal: 1000, its default, or a data.source",
        ),
        (["data.levels=[1]"], "data.levels=[1] has no effect without data.source"),
        (["data.size=0"], "data.size=0: legal: above 0"),
    ],
)
def test_records_are_in_files_or_made(run_file: Path, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(run_file, words)
    assert said in str(error.value)


def test_what_a_library_makes_needs_no_task(run_file: Path) -> None:
    table = RUN_FILE.partition("[data]")[2].partition("[generation]")[0]
    run_file.write_text(RUN_FILE.replace(table, '\nsource = "reasoning_gym:chain_sum"\n'))
    data = load_config(run_file).data[0]
    assert (data.task, data.reference_field, data.title) == ("reasoning_gym", "entry", "chain_sum")
    data = load_config(run_file, ["data.task=math_answer", "data.name=sums"]).data[0]
    assert (data.task, data.reference_field, data.title) == ("math_answer", "answer", "sums")
    for word, said in {
        "data.split=train": "data.split='train' has no effect without data.path",
        "data.source=": "data.path is not set, nor source",
        "data.levels=[-1]": "data.levels=[-1]; legal: from 0",
    }.items():
        with pytest.raises(ConfigError) as error:
            load_config(run_file, [word, "data.task=math_answer"])
        assert said in str(error.value)


def test_a_run_needs_every_reward_function_that_a_dataset_names(mixed_file: Path) -> None:
    words = ["data.1.task_field=kind", "data.1.tasks={easy='regex', hard='math_answer'}"]
    assert load_config(mixed_file, words).data_tasks == ("math_answer", "integer_arithmetic", "regex")


TWO_EVALUATIONS = """
[[evaluation]]
path = "data/held-out.jsonl"
samples = 6
keep_best = "maj@6"
[[evaluation]]
path = "data/math.jsonl"
name = "again"
dataset = "easy"
"""


def test_evaluations_have_names_figures_and_somebody_s_reward(run_file: Path, tmp_path: Path) -> None:
    run_file.write_text(f"{run_file.read_text()}{TWO_EVALUATIONS}")
    config = load_config(run_file, ["data.name=easy", "evaluation.1.every_steps=100", "checkpoint.every_steps=50"])
    assert [each.title for each in config.evaluation] == ["held-out", "again"]
    assert config.evaluation[0].path == tmp_path / "data/held-out.jsonl"
    assert config.evaluation[0].figures == ["pass@1", "pass@2", "pass@4", "pass@6", "maj@6", "reward"]
    assert config.evaluation[1].figures == ["pass@1", "reward"]
    write_resolved(config, RunLayout(tmp_path), "abc")
    assert read_resolved(RunLayout(tmp_path)) == (config, config_hash(config))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluation.1.name=held-out"], "evaluation.0 and evaluation.1 are both called 'held-out'"),
        (["evaluation.1.dataset=hard"], "evaluation.1.dataset='hard': names no dataset whose template"),
        (["evaluation.0.every_steps=30"], "evaluation.0.every_steps=30: a checkpoint comes every 50 steps"),
        (["evaluation.0.max_completion_tokens=0"], "evaluation.0.max_completion_tokens=0: legal: above 0"),
        (["evaluation.0.stop=['']"], "evaluation.0.stop=['']: legal: 16 texts or fewer"),
        (["evaluation.0.keep_best=pass@8"], "'pass@8' with samples=6; legal: 'pass@1', 'pass@2', 'pass@4', 'pass@6'"),
        (["evaluation.1.stop_after=2"], "evaluation.1.stop_after=2 has no effect without evaluation.1.keep_best: "),
        (["evaluation.0.temperature=0"], "samples=6: all samples of a prompt would be the same"),
        (["evaluation.0.temperature=0.005"], "temperature=0.005: vLLM would sample at 0.01; legal: 0, for"),
        (["evaluation.0.temperature=3"], "evaluation.0.temperature=3: legal: 2.0 or less"),
        (
            ["evaluation.0.sample=3"],
            "evaluation.0.sample=3: unknown key (did you mean samples?); legal: path, split, name",
        ),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(run_file: Path, words: list[str], said: str) -> None:
    run_file.write_text(f"{run_file.read_text()}{TWO_EVALUATIONS}")
    with pytest.raises(ConfigError) as error:
        load_config(run_file, ["data.name=easy", *words])
    assert said in str(error.value)


def test_of_several_datasets_an_evaluation_names_the_one_that_it_is_like(mixed_file: Path) -> None:
    table = '[evaluation]\npath = "{}"\n'
    mixed_file.write_text(f"{mixed_file.read_text()}{table.format('data/math.jsonl')}")
    assert load_config(mixed_file).evaluation[0].title == "math"
    with pytest.raises(ConfigError, match=r"evaluation.dataset='': names no dataset whose .* legal: 'math', 'sums'"):
        load_config(mixed_file, ["evaluation.path=other.jsonl"])
    assert load_config(mixed_file, ["evaluation.path=other.jsonl", "evaluation.dataset=sums"]).evaluation


def test_faults_of_the_only_dataset_are_told_without_a_number(run_file: Path) -> None:
    for words in (["data.weight=-1", "data.shuffles=true"], ["data.0.weight=-1"]):
        with pytest.raises(ConfigError) as error:
            load_config(run_file, words)
        assert "data.0.weight=" not in str(error.value) or words[0].startswith("data.0")
    with pytest.raises(ConfigError, match="data=\\[\\]"):
        load_config(run_file, ["data=[]"])


def test_a_run_that_began_with_one_table_goes_on(run_file: Path, tmp_path: Path) -> None:
    """Its config.json says "data": {…}."""
    write_resolved(load_config(run_file), RunLayout(tmp_path), "abc")
    document = json.loads((tmp_path / "config.json").read_bytes())
    (document["config"]["data"],) = document["config"]["data"]
    assert Config.model_validate(document["config"]) == load_config(run_file)


def test_a_deterministic_run_takes_groups_in_strict_order(run_file: Path) -> None:
    words = ["run.deterministic=true", "admission.max_staleness=1", "admission.window_groups=2"]
    with pytest.raises(ConfigError, match=r"run\.deterministic=true needs admission\.window_groups=1.*it is 2"):
        load_config(run_file, words)
    assert load_config(run_file, words[:2]).has_seeded_samples
    assert not load_config(run_file, []).has_seeded_samples


def test_every_key_explains_itself() -> None:
    for table in sections().values():
        for key in table.model_fields:
            assert meaning_of(table, key), key


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("trainer.learning_rate=fast", "trainer.learning_rate='fast': legal: a number"),
        ("run.num_steps=12.5", "run.num_steps=12.5: legal: a whole number"),
        ("trainer.token_budget=8e3", "trainer.token_budget=8000.0: legal: a whole number"),
        ("admission.groups_per_step=-4", "admission.groups_per_step=-4: legal: above 0"),
        ("generation.temperature=0.001", "generation.temperature=0.001: legal: 0.01 or more"),
        ("generation.temperature=3", "generation.temperature=3: legal: 2.0 or less"),
        ("algorithm.importance_cap=none", "algorithm.importance_cap='none': legal: a number, or 'off'"),
        ("algorithm.importance_cap=-1", "algorithm.importance_cap=-1: legal: above 0.0, or 'off'"),
        ("run.name=my run", "run.name='my run': legal: letters, digits, '.', '_' and '-', a letter or digit first"),
        ("transport.curve=yes", "transport.curve='yes': legal: true or false"),
        ("weights=3", "weights=3: legal: a table"),
        ("data.task=3", "data.task=3: legal: a string"),
        ("model.path=3", "model.path=3: legal: a path"),
    ],
)
def test_a_wrong_value_is_answered_in_one_line_with_what_is_legal(run_file: Path, word: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(run_file, [word])
    assert str(refusal.value) == f"command line: {said}"


@pytest.mark.parametrize("stop", [["a", ""], ["a"] * 17, ["a" * 257], ["\ufffd"]])
def test_stop_strings_that_end_nothing_or_are_no_text_are_refused(run_file: Path, stop: list[str]) -> None:
    legal = r"generation\.stop=.*: legal: 16 texts or fewer, each of 1 to 256 characters, none of them U\+FFFD$"
    with pytest.raises(ConfigError, match=legal):
        load_config(run_file, [f"generation.stop={stop}"])
    assert load_config(run_file, ["generation.stop=['</answer>', '\\n']"]).generation.stop == ("</answer>", "\\n")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("admission.max_stalness=1", "max_staleness"),
        ("trainer.group_size=4", "admission.group_size"),
        ("num_steps=3", "run.num_steps or sft.num_steps"),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_that_is_meant(run_file: Path, word: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key \(did you mean {meant}\?\); legal: "):
        load_config(run_file, [word])


def test_a_quoted_key_with_a_dot_is_refused_as_any_other(run_file: Path) -> None:
    run_file.write_text(RUN_FILE.replace("[run]", '"a.b" = 1\n[run]\n"name.x" = 2'))
    with pytest.raises(ConfigError, match=r"run\.name\.x=2: unknown key.*\n.*a\.b=1: unknown key"):
        load_config(run_file)


@pytest.mark.parametrize(
    ("words", "message", "way_out"),
    [
        (["admission.group_size=1"], r"group_size=1 with algorithm\.advantage='grpo'.*legal: 2 or more",
         ["admission.group_size=2"]),
        (["admission.group_size=1", "algorithm.advantage=reinforce_pp"],
         r"advantage='reinforce_pp' with admission\.active_sampling=true.*legal: admission\.active_sampling=false",
         ["admission.active_sampling=false"]),
        (["algorithm.advantage=gae"], r"advantage='gae' with admission\.active_sampling=true, its default: ",
         ["admission.active_sampling=false"]),
        (["admission.group_size=4", "algorithm.advantage=pass_at_k"],
         r"pass_k=4 with admission\.group_size=4.*legal: 2 to 3", ["algorithm.pass_k=3"]),
        (["admission.group_size=2", "algorithm.advantage=pass_at_k", "algorithm.pass_k=2"],
         r"pass_k=2 with admission\.group_size=2.*legal: admission\.group_size of 3 or more$",
         ["admission.group_size=3"]),
        (["shaping.overlong_tokens=9", "generation.max_completion_tokens=9"],
         r"overlong_tokens=9 with generation\.max_completion_tokens=9.*legal: 0 to 8", ["shaping.overlong_tokens=8"]),
        (["algorithm.minibatches=2"], r"proximal='current' with algorithm\.minibatches=2.*legal: 'recompute'",
         ["algorithm.proximal=recompute"]),
        (["algorithm.epochs=2"], r"proximal='current' with .*epochs=2", ["algorithm.proximal=behaviour"]),
        (["algorithm.minibatches=2", "algorithm.loss=reinforce", "algorithm.proximal=recompute"],
         r"loss='reinforce' with algorithm\.proximal='recompute' and algorithm\.minibatches=2.*legal: 'current'",
         ["algorithm.proximal=current"]),
        (["algorithm.minibatches=9", "algorithm.proximal=recompute", "admission.group_size=2",
          "admission.groups_per_step=4"], r"minibatches=9 with .* = 8 samples in a batch; legal: 1 to 8",
         ["algorithm.minibatches=8"]),
        (["algorithm.kl_coefficient=0.01", "algorithm.kl_in=reward"],
         r"algorithm.kl_in='reward' with algorithm.advantage='grpo', which knows no rewards of tokens; legal: 'loss'",
         [*GAE, "algorithm.kl_estimator=k1"]),
        (["algorithm.kl_coefficient=0.01", "algorithm.kl_in=reward", *GAE],
         r"kl_estimator='k3', its default, which is exponential .* usual is 'k1'", ["algorithm.kl_estimator=k1"]),
        (["algorithm.kl_coefficient=0.01", "algorithm.kl_estimator=k1"],
         r"kl_estimator='k1' with algorithm\.kl_coefficient=0\.01.* on average zero; legal: 'k2' or 'k3'",
         ["algorithm.kl_estimator=k2"]),
        (["algorithm.loss=gspo", "algorithm.proximal=behaviour"], r"clip_low=0\.2.*bounds for per-token ratios",
         ["algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"]),
    ],
)  # fmt: skip
def test_settings_that_make_the_statistics_wrong_are_refused_with_the_reason(
    run_file: Path, words: list[str], message: str, way_out: list[str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(run_file, words)
    load_config(run_file, [*words, *way_out])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["rewards.task_timeout_s={regex=2.0}"], "rewards.task_timeout_s names 'regex'; legal: a task of a dataset"),
        (["data.task=regex", "rewards.task_timeout_s={regex=0.0}"], "rewards.task_timeout_s: regex=0; legal: above 0"),
        (["data.task=regex", "rewards.task_memory_bytes={regex=-1}"], "regex=-1; legal: above 0"),
        (
            ["data.task=code_stdin", "rewards.task_timeout_s={code_stdin=5.0}"],
            "sandbox.wall_s=8 is not below rewards.task_timeout_s=5",
        ),
        (
            ["data.task=code_stdin", "sandbox.languages=['cpp']", "rewards.task_timeout_s={code_stdin=20.0}"],
            "sandbox.wall_s=8 with twice sandbox.compile_s is not below rewards.task_timeout_s=20",
        ),
    ],
)
def test_limits_of_single_tasks_are_of_tasks_that_are_there(run_file: Path, words: list[str], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(run_file, words)
    assert why in str(error.value)
    assert (
        load_config(run_file, ["data.task=regex", "rewards.task_timeout_s={regex=20.0}"]).rewards.timeout_of("regex")
        == 20
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["data.task=regex", "sandbox.languages=['python','cpp']"], "only data.task='code_stdin' runs C++"),
        (["data.task=code_stdin", "sandbox.languages=['cpp']", "sandbox.require=basic"], 'legal: require = "strong"'),
        (
            ["data.task=code_stdin", "sandbox.compile_s=5.0"],
            "sandbox.compile_s=5 has no effect with sandbox.languages='python'",
        ),
        (["data.task=code_stdin", "sandbox.languages=['rust']"], "sandbox.languages.0"),
        (
            [
                *("data.task=code_stdin", "data.task_field=kind", "data.tasks={f='code_functions'}"),
                "sandbox.languages=['cpp']",
            ],
            "data.task='code_functions', which runs Python",
        ),
    ],
)
def test_languages_of_programs_are_those_that_a_task_runs(run_file: Path, words: list[str], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(run_file, [*words, "rewards.timeout_s=60.0"])
    assert why in str(error.value)
    ways = ["data.task=code_stdin", "sandbox.languages=['cpp','python']", "rewards.timeout_s=60.0"]
    assert load_config(run_file, ways).sandbox.longest_s == 38.0
