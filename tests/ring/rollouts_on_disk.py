"""Read a run's segments with h5py and numpy alone, as rlhpc/buffer/README.md says a stranger can."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from launch.verify.audit import as_table, audit_run
from launch.verify.evidence import Depth
from launch.verify.report import CheckVerdict
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.journal import read_journals
from rlhpc.buffer.segments import read_rollouts_directory
from rlhpc.data.tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True)
class RolloutOnDisk:
    """One row of rollouts/, with what its group says."""

    group_id: int
    sample_index: int
    admitted_version: int
    consumed_step: int  # −1: none
    drop_reason: str
    reward: float
    verdict: str
    versions: NDArray[np.int32]  # [Lc]
    token_ids: NDArray[np.int32]  # [Lc]
    trained_version: int = -1  # −1: none
    is_applied: bool = False
    task: str = ""
    token_rewards: str = ""  # JSON; "": none


def rollouts_on_disk(directory: Path) -> list[RolloutOnDisk]:
    """Every rollout of the timeline that counts, in the order of the segments."""
    return [rollout for path in sorted(directory.glob("segment_*.h5")) for rollout in _rollouts_of(path)]


def consumed(directory: Path) -> list[RolloutOnDisk]:
    """Those that were trained on."""
    return [rollout for rollout in rollouts_on_disk(directory) if rollout.consumed_step >= 0]


def group_steps(directory: Path) -> list[tuple[int, int]]:
    """(group, step) of every row of groups/ that was trained on, with whatever appears twice."""
    pairs = []
    for path in sorted(directory.glob("segment_*.h5")):
        with h5py.File(path, "r", locking=False) as file:
            ids, steps = file["groups/group_id"][:], file["groups/consumed_step"][:]
        pairs += [(int(i), int(s)) for i, s in zip(ids, steps, strict=True) if s >= 0]
    return pairs


def assert_full_batches_trained_once(
    directory: Path, num_steps: int, groups_per_step: int, group_size: int, *, may_be_more: bool = False
) -> None:
    """Steps 0 … num_steps − 1 each have a whole batch, no group and no rollout stands twice, and the audit is clean.

    may_be_more: some groups are larger than group_size.
    """
    pairs, rollouts = group_steps(directory), consumed(directory)
    assert len({group for group, _ in pairs}) == len(pairs)
    found = {step: sum(s == step for _, s in pairs) for step in {s for _, s in pairs}}
    assert found == dict.fromkeys(range(num_steps), groups_per_step)
    names = {(rollout.group_id, rollout.sample_index) for rollout in rollouts}
    assert len(names) == len(rollouts)
    least = num_steps * groups_per_step * group_size
    assert len(names) > least if may_be_more else len(names) == least
    assert_the_audit_is_clean(RunLayout(directory.parent))


def num_sampled_again(directory: Path, before: Path) -> tuple[int, int]:
    """Of the rollouts in the first journal of a copy made `before`: those that ended otherwise than they stood there.

    Returns (their number, the number of all).  A rollout that was sampled anew has other tokens: samples have no seeds.
    """
    final = {(row.group_id, row.sample_index): row.token_ids.tolist() for row in rollouts_on_disk(directory)}
    rollouts = [record.scored.rollout for record in next(read_journals(before)).records]
    again = [row for row in rollouts if final[row.group_id, row.sample_index] != row.token_ids.tolist()]
    return len(again), len(rollouts)


def assert_the_audit_is_clean(layout: RunLayout) -> None:
    """The history is right.  Whether files are whole is for those to ask who have damaged none."""
    audit = audit_run(layout, Depth(), lambda text: None)
    broken = [check for check in audit.checks if check.verdict is CheckVerdict.VIOLATED and check.name != "files"]
    assert not broken, as_table(layout, audit)


def assert_looking_is_learnt(layout: RunLayout, model: Path, look: str) -> None:
    """A policy that mostly guessed is right in the end, since it looks; look: what it says first where it does."""
    tokenizer = PromptTokenizer(model)
    call = int(tokenizer.encode_rendered(look)[0])
    rewards, searches = defaultdict[int, list[float]](list), defaultdict[int, list[bool]](list)
    for resolved in read_rollouts_directory(layout.rollouts):
        for member in resolved.group.members:
            rollout = member.rollout
            rewards[resolved.group.admitted_version].append(member.reward)
            own = rollout.token_ids[rollout.loss_mask]
            searches[resolved.group.admitted_version].append(bool((own == call).any()))
            assert rollout.loss_mask[-1]
            assert (rollout.behaviour_logprobs[~rollout.loss_mask] == 0).all()
    versions = sorted(rewards)
    latest = versions[-4:]  # of the last one, the end of the run leaves a few that were short
    last = np.concatenate([rewards[version] for version in latest])
    assert np.mean(rewards[versions[0]]) <= 0.3
    assert np.mean(last) >= 0.8
    assert np.mean(searches[versions[0]]) < np.mean(np.concatenate([searches[version] for version in latest]))


def _rollouts_of(path: Path) -> list[RolloutOnDisk]:
    with h5py.File(path, "r", locking=False) as file:
        groups = {name: column[:] for name, column in file["groups"].items()}
        rollouts = {name: column[:] for name, column in file["rollouts"].items()}
    found = []
    for g, group_id in enumerate(groups["group_id"]):
        for r in range(*groups["rollout_offsets"][g : g + 2]):
            tokens = slice(*rollouts["token_offsets"][r : r + 2])
            assert rollouts["group_id"][r] == group_id
            found.append(
                RolloutOnDisk(
                    group_id=int(group_id),
                    sample_index=int(rollouts["sample_index"][r]),
                    admitted_version=int(groups["admitted_version"][g]),
                    consumed_step=int(groups["consumed_step"][g]),
                    drop_reason=groups["drop_reason"][g].decode(),
                    reward=float(rollouts["reward"][r]),
                    verdict=rollouts["verdict"][r].decode(),
                    versions=rollouts["versions"][tokens],
                    token_ids=rollouts["token_ids"][tokens],
                    trained_version=int(groups["trained_version"][g]),
                    is_applied=bool(groups["applied"][g] == 1),
                    task=_text(groups, "task", g),
                    token_rewards=_text(rollouts, "token_rewards", r),
                )
            )
    return found


def _text(table: dict[str, NDArray[np.generic]], name: str, row: int) -> str:
    first, last = table[f"{name}_offsets"][row : row + 2]
    return table[name][first:last].tobytes().decode()
