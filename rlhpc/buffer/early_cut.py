"""Over-sampling: which stragglers a batch need not wait for (admission.oversample).

Input: GroupRecord, oldest first.  Output: ids of groups to drop.  Pure.  A batch of P groups is there as soon as P of
the oldest P + E are finished: those that stand before the last of these P and are not finished are cut.  What is
trained is in order of admission, as without; a dropped group is trained by nobody, so that the bound of the ledger
on staleness is untouched (docs/design.md, §4).
"""

from __future__ import annotations

from collections.abc import Iterable

from rlhpc.buffer.group_record import GroupRecord


def in_the_way(groups: Iterable[GroupRecord], num_groups: int, most: int) -> list[int]:
    """Unfinished groups without which the oldest num_groups others are a batch; [] if there are more than `most`.

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
