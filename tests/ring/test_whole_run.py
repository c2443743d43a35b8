"""A run from its first process to its summary, looked at from outside."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

from rlhpc.base.run_directory import RunLayout
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.metrics.names import HISTOGRAMS, METRICS, find_metric
from rlhpc.training.checkpoint_directory import latest_complete
from tests.ring.ring_rewards import parity_by_characters
from tests.ring.rollouts_on_disk import RolloutOnDisk, assert_full_batches_trained_once, consumed, rollouts_on_disk
from tests.ring.run_kit import Lab, rlhpc, run_to_the_end, summary_of

pytestmark = pytest.mark.ring
NUM_STEPS, GROUPS, GROUP_SIZE = 10, 4, 4
BY_CHARACTERS = "tests.ring.ring_rewards:parity_by_characters"
SLOWLY = "tests.ring.ring_rewards:very_slow_parity"
KEYS = (
    "steps", "rollouts_trained", "reward_first_tenth", "reward_last_tenth", "staleness_max", "staleness_bound",
    "rollouts_spanning_update", "packing_fill", "generator_tokens_per_s", "trainer_tokens_per_s",
    "generator_idle_ratio", "trainer_idle_ratio", "wall_s",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole_run(lab: Lab) -> RunLayout:
    """With all that has figures of its own, so that every documented scalar has an occasion."""
    algorithm = {
        "kl_coefficient": 0.01,
        "kl_in": "reward",
        "kl_estimator": "k1",
        "entropy_coefficient": 1e-4,
        "advantage": "gae",
        "forward_kl_coefficient": 1e-3,
        "teacher_top_k": 4,
    }
    few = lab.root / "few.jsonl"
    few.write_text("".join(lab.dataset.read_text().splitlines(keepends=True)[:3]))  # whose epochs end
    task = SLOWLY  # a run of several heartbeats, however fast the machine
    data = [{"path": str(lab.dataset), "task": task, "name": "sums"}, {"path": str(few), "task": BY_CHARACTERS}]
    return run_to_the_end(
        lab,
        "whole",
        run={"num_steps": NUM_STEPS},
        algorithm=algorithm | {"advantage_normalization": "batch"},
        critic={"learning_rate": 1e-3},
        data=data,
        curriculum={"target_pass_rate": 0.5, "min_chance": 0.01},
        admission={"active_sampling": False},
        service=[{"name": "larger", "kind": "teacher", "path": str(lab.model)}],
    )


@pytest.fixture(scope="module")
def events(whole_run: RunLayout) -> EventAccumulator:
    return _events_of(whole_run.tensorboard)


def test_the_summary_has_every_promised_figure(whole_run: RunLayout) -> None:
    summary = summary_of(whole_run)
    assert set(KEYS) <= set(summary)
    assert summary["steps"] == NUM_STEPS
    assert summary["rollouts_trained"] == NUM_STEPS * GROUPS * GROUP_SIZE
    assert 0 <= summary["staleness_max"] <= summary["staleness_bound"] == 1
    for share in ("rollouts_spanning_update", "packing_fill", "generator_idle_ratio", "trainer_idle_ratio"):
        assert 0 <= summary[share] <= 1, share
    for rate in ("generator_tokens_per_s", "trainer_tokens_per_s", "wall_s"):
        assert summary[rate] > 0, rate


def test_every_batch_was_full_and_nothing_was_trained_twice(whole_run: RunLayout) -> None:
    assert_full_batches_trained_once(whole_run.rollouts, NUM_STEPS, GROUPS, GROUP_SIZE)


def test_rewards_of_the_summary_are_those_of_the_segments(whole_run: RunLayout) -> None:
    groups: dict[int, list[RolloutOnDisk]] = defaultdict(list)
    for rollout in rollouts_on_disk(whole_run.rollouts):
        if rollout.verdict != "verifier_error":
            groups[rollout.group_id].append(rollout)
    by_version: dict[int, list[float]] = defaultdict(list)
    for members in groups.values():
        if len(members) == GROUP_SIZE:
            by_version[members[0].admitted_version] += [member.reward for member in members]
    summary = summary_of(whole_run)
    # The last batch may all be admitted a version earlier, and the version of the last step may have groups already.
    newest = max(version for version in by_version if version < NUM_STEPS)
    for key, version in (("reward_first_tenth", 0), ("reward_last_tenth", newest)):
        rewards = by_version[version]
        assert summary[key] == pytest.approx(sum(rewards) / len(rewards), abs=1e-12), key
    assert summary["reward_by_version"] == [
        [version, pytest.approx(sum(r) / len(r)), len(r)] for version, r in sorted(by_version.items())
    ]


def test_rewards_of_tokens_are_on_disk_to_the_last_bit_where_the_function_gives_them(
    whole_run: RunLayout, lab: Lab
) -> None:
    """The audit of this run is clean, another test says; its trainer makes advantages of them by a critic."""
    tokenizer, by_task = PromptTokenizer(lab.model), defaultdict[str, list[RolloutOnDisk]](list)
    for rollout in rollouts_on_disk(whole_run.rollouts):
        by_task[rollout.task].append(rollout)
    others = by_task.pop(SLOWLY)
    assert {rollout.token_rewards for rollout in others} == {""}
    (of_tokens,) = by_task.values()
    for rollout in of_tokens:
        text = tokenizer.decode(rollout.token_ids)
        found = {int(place): value for place, value in json.loads(rollout.token_rewards or "{}").items()}
        expected = parity_by_characters(text, "").rewards_at
        assert sorted(found.values()) == sorted(expected.values())
        for (num_characters, value), place in zip(sorted(expected.items()), sorted(found), strict=True):
            assert found[place] == value
            assert tokenizer.decode(rollout.token_ids[: place + 1]) == text[:num_characters]
    assert any(rollout.token_rewards for rollout in of_tokens)


def test_staleness_and_spans_of_the_summary_are_those_of_the_segments(whole_run: RunLayout) -> None:
    trained, summary = consumed(whole_run.rollouts), summary_of(whole_run)
    assert summary["staleness_max"] == max(r.trained_version - r.admitted_version for r in trained)
    assert min(r.trained_version - r.admitted_version for r in trained) >= 0
    spanning = sum(len(set(r.versions.tolist())) > 1 for r in trained)
    assert summary["rollouts_spanning_update"] == pytest.approx(spanning / len(trained))
    assert all(r.versions[0] >= r.admitted_version and r.versions[-1] <= r.consumed_step for r in trained)


def test_a_critic_s_run_trains_groups_without_reward_variance_too(whole_run: RunLayout) -> None:
    rewards: dict[int, set[float]] = defaultdict(set)
    for rollout in consumed(whole_run.rollouts):
        rewards[rollout.group_id].add(rollout.reward)
    assert {len(values) for values in rewards.values()} == {1, 2}


def test_tensorboard_holds_documented_scalars_at_every_step(events: EventAccumulator) -> None:
    written = _tags_of(events, "scalars")
    for name in written:
        find_metric(name)  # raises for an unknown one
    assert "reward_part/odd" in written
    assert [event.step for event in events.Scalars("trainer/loss")] == list(range(NUM_STEPS))


def test_the_policy_begins_as_its_reference_and_leaves_it(events: EventAccumulator) -> None:
    distances = [event.value for event in events.Scalars("policy/kl_reference")]
    assert len(distances) == NUM_STEPS
    assert 0 <= distances[0] < 1e-6 < distances[-1]


def test_tensorboard_shows_a_run_as_one(whole_run: RunLayout) -> None:
    assert all(path.is_file() for path in whole_run.tensorboard.iterdir())


RARE = {"rollout/routed_share"}  # of mixtures whose routes are replayed (test_routing_replay_run.py)


def test_every_documented_scalar_is_written(events: EventAccumulator) -> None:
    named = {name for name in METRICS if not name.endswith("/*") and not name.startswith("sft/")}
    assert named - _tags_of(events, "scalars") == RARE


def test_every_dataset_has_its_share_and_its_curves(events: EventAccumulator) -> None:
    written = _tags_of(events, "scalars")
    families = {name.removesuffix("*") for name in METRICS if name.startswith("dataset_")}
    assert {name + dataset for name in families for dataset in ("sums", "few")} <= written
    shares = [np.mean([event.value for event in events.Scalars(f"dataset_share/{name}")]) for name in ("sums", "few")]
    assert shares == pytest.approx([0.5, 0.5], abs=0.2)  # drawn alike; batches may leave the slower one's groups behind
    assert events.Scalars("dataset_known_share/few")[-1].value == 1
    assert events.Scalars("dataset_known_share/sums")[-1].value < 0.2


def test_tensorboard_holds_histograms_texts_and_the_dashboard(events: EventAccumulator, whole_run: RunLayout) -> None:
    assert _tags_of(events, "histograms") == set(HISTOGRAMS)
    settings = events.Tensors("run/config")[0].tensor_proto.string_val[0].decode()
    assert json.loads(whole_run.config.read_bytes())["hash"] in settings
    assert "**reward" in events.Tensors("samples/0")[0].tensor_proto.string_val[0].decode()
    assert _tags_of(events, "custom_scalars")


def test_the_run_directory_holds_what_the_layout_says(whole_run: RunLayout) -> None:
    assert whole_run.secrets.stat().st_mode & 0o777 == 0o700
    assert len(whole_run.attempts.read_text().splitlines()) == 1
    assert json.loads(whole_run.status.read_bytes())["phase"] == "complete"
    logs = {path.name for path in whole_run.logs.iterdir()}
    assert logs == {"controller-0", "reward-0", "trainer-0", "generator-0", "service-0"}
    assert not list(whole_run.root.rglob("*.partial"))
    found = latest_complete(whole_run.checkpoints)
    assert found is not None
    assert found[0] == NUM_STEPS


def test_the_checkpoint_at_the_end_leaves_as_a_model(whole_run: RunLayout, tmp_path: Path) -> None:
    done = rlhpc("export", str(whole_run.root), str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "model").iterdir()}
    assert list((tmp_path / "model").glob("*.safetensors"))


def test_status_of_a_run_that_is_over_says_so(whole_run: RunLayout) -> None:
    done = rlhpc("status", str(whole_run.root))
    assert done.returncode == 0
    assert f"complete, step {NUM_STEPS}/{NUM_STEPS}" in done.stdout
    assert "not running on this machine" in done.stdout


def _events_of(directory: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory), size_guidance={TENSORS: 0})  # 0: keep all
    accumulator.Reload()
    return accumulator


def _tags_of(events: EventAccumulator, plugin: str) -> set[str]:
    if plugin == "scalars":
        return set(events.Tags()["scalars"])
    tags = events.Tags()["tensors"]
    return {tag for tag in tags if events.SummaryMetadata(tag).plugin_data.plugin_name == plugin}
