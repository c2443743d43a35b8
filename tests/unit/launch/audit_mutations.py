"""Ways to falsify the history of a run so that every checksum still holds: what only an audit can find.

Input: a run directory.  Output: the directory, changed in one place, and what the audit has to name: a group, a step,
or a file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.base.native import crc32
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import DropReason, ResolvedGroup
from rlhpc.buffer.history import event_paths
from rlhpc.buffer.segments import read_raw_columns, read_segment, segment_paths, to_hdf5
from rlhpc.protocol.types import ScoredRollout
from rlhpc.training.checkpoint_directory import COMPLETE, KnownCheckpoints, complete


@dataclass(frozen=True, slots=True)
class Falsified:
    """What the audit must name; -1: not that."""

    group: int = -1
    step: int = -1
    file: str = ""


# --------------------------------------------------------------------------------------------------------- segments


def edit_segment(path: Path, change: Callable[[list[ResolvedGroup]], None]) -> None:
    """Write a segment anew, with checksums that hold."""
    groups = read_segment(path)
    attributes, _ = read_raw_columns(path, [], is_verified=False)
    change(groups)
    own = {name: attributes[name] for name in ("run_name", "run_attempt", "segment_index", "sealed_unix_s")}
    path.write_bytes(to_hdf5(groups, own))


def _some_group(
    layout: RunLayout, chance: random.Random, is_wanted: Callable[[ResolvedGroup], bool] = lambda group: True
) -> tuple[Path, int, ResolvedGroup] | None:
    """(segment, row, group): any but the last one, which might as well not be sealed yet."""
    found = [
        (path, row, group) for path in segment_paths(layout.rollouts) for row, group in enumerate(read_segment(path))
    ]
    found = [each for each in found[:-1] if is_wanted(each[2])]
    return chance.choice(found) if found else None


def is_trained(group: ResolvedGroup) -> bool:
    return group.consumed_step >= 0


def a_group_is_gone(layout: RunLayout, chance: random.Random) -> Falsified | None:
    if (found := _some_group(layout, chance)) is None:
        return None
    path, row, group = found
    edit_segment(path, lambda groups: groups.pop(row))
    return Falsified(group=group.group.group_id)


def a_group_stands_twice(layout: RunLayout, chance: random.Random) -> Falsified | None:
    if (found := _some_group(layout, chance)) is None:
        return None
    _, _, group = found
    edit_segment(segment_paths(layout.rollouts)[-1], lambda groups: groups.append(group))
    return Falsified(group=group.group.group_id)


def _with_members(group: ResolvedGroup, members: tuple[ScoredRollout, ...]) -> ResolvedGroup:
    return replace(group, group=replace(group.group, members=members))


def _replaced(
    layout: RunLayout,
    chance: random.Random,
    change: Callable[[ResolvedGroup], ResolvedGroup],
    is_wanted: Callable[[ResolvedGroup], bool] = is_trained,
) -> Falsified | None:
    if (found := _some_group(layout, chance, is_wanted)) is None:
        return None
    path, row, group = found

    def put(groups: list[ResolvedGroup]) -> None:
        groups[row] = change(groups[row])

    edit_segment(path, put)
    return Falsified(group=group.group.group_id, step=group.consumed_step)


def a_member_is_gone(layout: RunLayout, chance: random.Random) -> Falsified | None:
    return _replaced(layout, chance, lambda group: _with_members(group, group.group.members[1:]))


def a_sample_stands_twice(layout: RunLayout, chance: random.Random) -> Falsified | None:
    return _replaced(layout, chance, lambda group: _with_members(group, (group.group.members[0],) * 2))


def it_is_staler_than_allowed(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(group: ResolvedGroup) -> ResolvedGroup:
        return replace(group, group=replace(group.group, admitted_version=group.trained_version - 3))

    return _replaced(layout, chance, change)


def it_is_of_another_step(layout: RunLayout, chance: random.Random) -> Falsified | None:
    return _replaced(layout, chance, lambda group: replace(group, consumed_step=group.consumed_step + 1))


def it_was_dropped(layout: RunLayout, chance: random.Random) -> Falsified | None:
    dropped = {"consumed_step": -1, "trained_version": -1, "applied": None, "drop_reason": DropReason.POISON}
    return _replaced(layout, chance, lambda group: replace(group, **dropped))


def it_trained_another_version(layout: RunLayout, chance: random.Random) -> Falsified | None:
    found = _replaced(layout, chance, lambda group: replace(group, trained_version=group.trained_version + 1))
    return None if found is None else Falsified(file="segment")


def it_has_another_prompt(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(group: ResolvedGroup) -> ResolvedGroup:
        prompt = replace(group.group.prompt, prompt_id=group.group.prompt.prompt_id + 1000)
        return replace(group, group=replace(group.group, prompt=prompt))

    return _replaced(layout, chance, change, lambda group: True)


def _with_versions(group: ResolvedGroup, versions: Callable[[Any], Any]) -> ResolvedGroup:
    first, *others = group.group.members
    rollout = replace(first.rollout, versions=versions(first.rollout.versions))
    return _with_members(group, (replace(first, rollout=rollout), *others))


def a_token_is_of_a_version_that_never_was(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(versions: Any) -> Any:
        return np.append(versions[:-1], np.int32(1000)).astype(np.int32)

    return _replaced(layout, chance, lambda group: _with_versions(group, change))


def a_token_is_older_than_the_one_before(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def is_long(group: ResolvedGroup) -> bool:
        versions = group.group.members[0].rollout.versions if group.group.members else ()
        return is_trained(group) and len(versions) > 1 and versions[0] > 0

    def change(versions: Any) -> Any:
        return np.append(versions[:-1], versions[0] - 1).astype(np.int32)

    return _replaced(layout, chance, lambda group: _with_versions(group, change), is_long)


def a_segment_is_gone(layout: RunLayout, chance: random.Random) -> Falsified | None:
    paths = segment_paths(layout.rollouts)[:-1]
    if not paths:
        return None
    path = chance.choice(paths)
    path.unlink()
    return Falsified(file=f"rollouts/{path.name}")


# ----------------------------------------------------------------------------------------------------------- events


def events_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of an event log."""
    return [json.loads(line[9:]) for line in path.read_bytes().splitlines() if line.endswith(b"}")]


def edit_events(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Write the whole lines of an event log anew, with checksums that hold."""
    events = events_of(path)
    change(events)
    lines = [json.dumps(event).encode() for event in events]
    path.write_bytes(b"".join(f"{crc32(line):08x} ".encode() + line + b"\n" for line in lines))


def _some_event(layout: RunLayout, chance: random.Random, *kinds: str) -> tuple[Path, int, dict[str, Any]] | None:
    """(file, index, event): one that others of its attempt follow, since a kill may take the last ones."""
    found = list(_events(layout))
    last = {path: index for path, index, event in found if event["event"] in ("trained", "taken")}
    found = [each for each in found if each[2]["event"] in kinds and each[1] < last.get(each[0], 0)]
    return chance.choice(found) if found else None


def _events(layout: RunLayout) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    for path in event_paths(layout.rollouts):
        for index, event in enumerate(events_of(path)):
            yield path, index, event


def _named(event: dict[str, Any]) -> Falsified:
    return Falsified(group=event.get("group", -1), step=event.get("step", -1))


def a_line_is_gone(kind: str) -> Callable[[RunLayout, random.Random], Falsified | None]:
    def mutate(layout: RunLayout, chance: random.Random) -> Falsified | None:
        if (found := _some_event(layout, chance, kind)) is None:
            return None
        path, index, event = found
        edit_events(path, lambda events: events.pop(index))
        return _named(event) if kind != "taken" else Falsified(step=event["step"])

    mutate.__name__ = f"a_line_is_gone_{kind}"
    return mutate


def a_line_stands_twice(kind: str) -> Callable[[RunLayout, random.Random], Falsified | None]:
    def mutate(layout: RunLayout, chance: random.Random) -> Falsified | None:
        if (found := _some_event(layout, chance, kind)) is None:
            return None
        path, index, event = found
        edit_events(path, lambda events: events.insert(index, event))
        return _named(event)

    mutate.__name__ = f"a_line_stands_twice_{kind}"
    return mutate


def a_batch_has_another_group(layout: RunLayout, chance: random.Random) -> Falsified | None:
    if (found := _some_event(layout, chance, "taken")) is None:
        return None
    path, index, event = found
    edit_events(path, lambda events: events[index]["groups"].__setitem__(0, 9999))
    return Falsified(step=event["step"])


# ------------------------------------------------------------------------------------------------------ checkpoints


def edit_checkpoint(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change controller.json, and complete the checkpoint again."""
    document = json.loads((path / "controller.json").read_bytes())
    manifest = {name: value for name, value in json.loads((path / COMPLETE).read_bytes()).items() if name != "files"}
    change(document)
    temporary = path.with_name(f".{path.name}.tmp")
    path.rename(temporary)
    (temporary / COMPLETE).unlink()
    (temporary / "controller.json").write_text(json.dumps(document))
    complete(temporary, path, manifest)


def _edited(layout: RunLayout, chance: random.Random, change: Callable[[dict[str, Any]], None]) -> Falsified | None:
    steps = KnownCheckpoints(layout.checkpoints).steps()
    if not steps:
        return None
    _, path = chance.choice(steps)
    edit_checkpoint(path, change)
    return Falsified(file=f"checkpoints/{path.name}")


def a_checkpoint_counts_one_more_trained(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(document: dict[str, Any]) -> None:
        document["buffer"]["ledger"]["num_released"] += 1

    return _edited(layout, chance, change)


def a_checkpoint_counts_one_more_dropped(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(document: dict[str, Any]) -> None:
        dropped = document["buffer"]["ledger"]["dropped"]
        dropped["poison"] = dropped.get("poison", 0) + 1

    return _edited(layout, chance, change)


def a_checkpoint_is_of_another_version(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(document: dict[str, Any]) -> None:
        document["policy_version"] += 1

    return _edited(layout, chance, change)


def a_checkpoint_has_another_cursor(layout: RunLayout, chance: random.Random) -> Falsified | None:
    def change(document: dict[str, Any]) -> None:
        prompts = document["prompts"]
        chance.choice(prompts.get("datasets", [prompts]))["cursor"] += 1

    return _edited(layout, chance, change)


def a_checkpoint_has_lost_an_open_group(layout: RunLayout, chance: random.Random) -> Falsified | None:
    steps = KnownCheckpoints(layout.checkpoints).steps()
    if not steps:
        return None
    path = steps[-1][1]  # older ones are gone by the time that their open groups would be missed
    groups = json.loads((path / "controller.json").read_bytes())["buffer"]["ledger"]["groups"]
    resolved = {group.group.group_id for segment in segment_paths(layout.rollouts) for group in read_segment(segment)}
    groups = [group["group_id"] for group in groups if group["group_id"] not in resolved and not group["delivered"]]
    if not groups:
        return None
    gone = chance.choice(groups)

    def change(document: dict[str, Any]) -> None:
        ledger = document["buffer"]["ledger"]
        ledger["groups"] = [group for group in ledger["groups"] if group["group_id"] != gone]

    edit_checkpoint(path, change)
    return Falsified(group=gone)


def a_checkpoint_opens_a_trained_group(layout: RunLayout, chance: random.Random) -> Falsified | None:
    steps = KnownCheckpoints(layout.checkpoints).steps()
    if not steps:
        return None
    path = steps[-1][1]
    document = json.loads((path / "controller.json").read_bytes())
    before = [
        group.group
        for segment in segment_paths(layout.rollouts)[: document["buffer"]["next_segment_index"]]
        for group in read_segment(segment)
        if is_trained(group)
    ]
    if not before:
        return None
    group = chance.choice(before)
    prompt = group.prompt
    again = {
        "group_id": group.group_id,
        "admitted_version": group.admitted_version,
        "prompt": {
            "prompt_id": prompt.prompt_id,
            "task": prompt.task,
            "token_ids": prompt.token_ids.tolist(),
            "reference": prompt.reference,
        },
        "delivered": [],
        "strikes": [0, 0],
        "num_leases": 0,
    }
    edit_checkpoint(path, lambda document: document["buffer"]["ledger"]["groups"].append(again))
    return Falsified(group=group.group_id)


MUTATIONS: tuple[Callable[[RunLayout, random.Random], Falsified | None], ...] = (
    a_group_is_gone,
    a_group_stands_twice,
    a_member_is_gone,
    a_sample_stands_twice,
    it_is_staler_than_allowed,
    it_is_of_another_step,
    it_was_dropped,
    it_trained_another_version,
    it_has_another_prompt,
    a_token_is_of_a_version_that_never_was,
    a_token_is_older_than_the_one_before,
    a_segment_is_gone,
    *(a_line_is_gone(kind) for kind in ("admitted", "taken", "trained", "dropped")),
    *(a_line_stands_twice(kind) for kind in ("admitted", "taken", "trained", "dropped")),
    a_batch_has_another_group,
    a_checkpoint_counts_one_more_trained,
    a_checkpoint_counts_one_more_dropped,
    a_checkpoint_is_of_another_version,
    a_checkpoint_has_another_cursor,
    a_checkpoint_has_lost_an_open_group,
    a_checkpoint_opens_a_trained_group,
)
