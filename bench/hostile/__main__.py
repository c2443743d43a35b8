"""Attack the servers of all channels, and see that nothing comes through, nothing breaks, and nobody honest waits.

    python -m bench.hostile --frames 1000000 --connections 10000        `make soak-hostile`; about ten minutes

Mutated messages of every type go to the codec and, through real sockets, from a member whose key is admitted.  Then
strangers come: without CURVE, with keys that nobody knows, with greetings cut at each byte, in silence.  Meanwhile an
honest member asks and is answered a hundred times a second.  The servers live in a process of their own.

Exit status 1 if an altered message was delivered, a forged one that no honest sender could have sent, an exception
escaped, an honest message did not arrive or waited for longer than FRIEND_LIMIT_S, or memory grew by more than
GROWTH_LIMIT_MB.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.hostile.frames import Tally, attack
from bench.hostile.strangers import Stranger, Visits
from bench.hostile.victim_link import MEMBERS, Friend, Victim

GROWTH_LIMIT_MB = 64.0
FRIEND_LIMIT_S = 5.0  # a third of transport.dead_after_s: nobody is taken for dead
WARM_UP = 0.02  # of all frames and connections: what is allocated once
LEAST_WARM_UP = 500
SHARES = {"visit": 0.5, "linger": 0.3, "knock": 0.19, "break_rules": 0.01}  # of connections
DESCRIPTORS_KEPT = 200  # for everything else


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="mutated messages (1000000)")
    parser.add_argument("--connections", type=int, default=10_000, help="hostile connections (10000)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="rlhpc-hostile-") as root:
        violations = besiege(Path(root), options.frames, options.connections, options.seed)
    for violation in violations[:50]:
        print(f"VIOLATION  {violation}")
    return 1 if violations else 0


def besiege(root: Path, num_frames: int, num_connections: int, seed: int = 0) -> list[str]:
    """Attack with so many frames and connections, and print what became of them; returns what must not be."""
    with Victim(root) as victim, Friend(victim) as friend:
        warm_frames, warm_visits = Tally(), Visits()
        attack(victim, warm_frames, max(LEAST_WARM_UP, int(num_frames * WARM_UP)), seed + 1)
        connect(
            victim,
            warm_visits,
            max(LEAST_WARM_UP // 5, int(num_connections * WARM_UP)),
            seed + 1,
            ways=("visit", "knock"),
        )
        tally, visits = Tally(), Visits()
        violations = [*warm_frames.violations, *warm_visits.violations]
        violations += _phase(victim, friend, lambda: attack(victim, tally, num_frames, seed), "frames")
        _print_frames(tally)
        violations += _phase(victim, friend, lambda: connect(victim, visits, num_connections, seed), "connections")
        _print_visits(visits)
        violations += tally.violations + visits.violations
    return violations + ([f"the honest member: {friend.trouble}"] if friend.trouble else [])


def connect(victim: Victim, visits: Visits, num: int, seed: int, ways: Iterable[str] = tuple(SHARES)) -> None:
    """Make connections of every kind, or of these; nothing of them may arrive."""
    stranger = Stranger(victim, seed)
    before = victim.report()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for kind, share in ((way, SHARES[way]) for way in ways):
        at_once = hard // 2 - DESCRIPTORS_KEPT if kind == "linger" else num
        left = max(4, int(num * share))
        while left > 0:
            getattr(stranger, kind)(visits, min(left, at_once))
            left -= at_once
    visits.violations += _what_came(before, victim.report())


def _what_came(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What was delivered of strangers, or of anyone but the friend."""
    found = [
        f"{name} delivered {tally} by strangers, {before['tallies'].get(name)} before"
        for name, tally in after["tallies"].items()
        if not name.endswith("/generator-0") and tally != before["tallies"].get(name)
    ]
    for name, statistics in after["statistics"].items():
        found += [f"{name} has peer {peer}" for peer in statistics["peers"] if peer not in MEMBERS]
    if sum(s["denied"] for s in after["statistics"].values()) == sum(
        s["denied"] for s in before["statistics"].values()
    ):
        found.append("no stranger's key was refused: nobody has knocked")
    return found


def _phase(victim: Victim, friend: Friend, attack_it: Callable[[], None], what: str) -> list[str]:
    """Do one kind of attack; returns what it did to memory, to exceptions and to the honest member."""
    victim.forget_peak()
    before, began, num_before = victim.report(), time.monotonic(), len(friend.latencies_s)
    attack_it()
    after, took_s = victim.report(), time.monotonic() - began
    waits = sorted(friend.latencies_s[num_before:])
    growth_mb, peak_mb = after["rss_mb"] - before["rss_mb"], after["peak_mb"] - before["rss_mb"]
    print(f"\n{what}: {took_s:.0f} s")
    print(f"  memory of the servers   {before['rss_mb']:.1f} MB, grown by {growth_mb:.1f}, by {peak_mb:.1f} at most")
    print(f"  escaped exceptions      {len(after['escaped'])}")
    if not waits:
        return [f"{what}: the honest member was not answered once"]
    median_s, high_s, longest_s = (waits[int(share * (len(waits) - 1))] for share in (0.5, 0.99, 1.0))
    print(
        f"  an honest member        {len(waits)} answers after {median_s * 1e3:.1f} ms, "
        f"99 % within {high_s * 1e3:.0f}, all within {longest_s * 1e3:.0f}"
    )
    found = [f"{what}: escaped: {each}" for each in after["escaped"]]
    if growth_mb > GROWTH_LIMIT_MB:
        found.append(f"{what}: memory grew by {growth_mb:.1f} MB")
    if longest_s > FRIEND_LIMIT_S:
        found.append(f"{what}: the honest member waited for {longest_s:.1f} s")
    return found


def _print_frames(tally: Tally) -> None:
    print(f"  through sockets         {tally.num_sent}; the others have frames that end a connection")
    print(f"  altered                 {tally.num_altered}, delivered {tally.num_altered_delivered}")
    print(
        f"  forged                  {tally.num_forged}, of which {tally.num_forged_valid} are honest messages as well"
    )
    print(f"  {'kind':<24}{'sent':>9}{'decoded':>9}")
    for kind, sent in sorted(tally.sent.items()):
        print(f"  {kind:<24}{sent:>9}{tally.accepted[kind]:>9}")


def _print_visits(visits: Visits) -> None:
    print(f"  connections             {visits.made.total()}, at most {visits.most_at_once} at once")
    for kind, made in sorted(visits.made.items()):
        print(f"  {kind:<28}{made:>7}")


if __name__ == "__main__":
    sys.exit(main())
