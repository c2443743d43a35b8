"""Over-sampling: which stragglers a batch need not wait for (admission.oversample).

Input: GroupRecord, oldest first.  Output: ids of groups to drop.  Pure.  A batch of P groups is complete once P of the
oldest P + E are finished: unfinished groups before the last of these P are cut.  Training still follows the order of
admission, and dropped groups are never trained, so that the ledger's staleness bound still holds (docs/design.md, §4).
"""

from __future__ import annotations

from collections.abc import Iterable

from rlhpc.buffer.group_record import GroupRecord


def in_the_way(groups: Iterable[GroupRecord], num_groups: int, most: int) -> list[int]:
    """Unfinished groups before the num_groups-th finished one; [] if more than `most`, or if too few are finished.

    groups: neither taken nor dropped, in order of admission.
    """
    passed: list[int] = []
    for group in groups:
        if group.is_finished:
            num_groups -= 1
        elif len(passed) < most:
            passed.append(group.group_id)
        else:
            return []
        if num_groups == 0:
            return passed
    return []
