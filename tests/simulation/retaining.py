"""Policies of rows in the simulation: who sets one and runs it beside writers, and the builds that fail him.

The oracle takes a truncation by a policy as any other one. When it lands, nothing may go that is younger than the
policy says, by true time and as far as clocks may be off, nor what a consumer has not passed. At the end, when all is
at rest, everything has to go that is old enough.
"""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

from persist.client.row_retention import run_retention
from persist.client.shard import Shard
from persist.client.transport import ForwardingTransport, OneShard
from persist.core import commands as c
from persist.core import retention_plan
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import Conflict, Corruption, Indeterminate, Overloaded, Unavailable
from persist.core.retention_plan import facts_of, next_ms
from persist.core.state import State
from persist.core.transitions import policy_and_erasure_progress
from tests.simulation.breaking import Broken, every, transition
from tests.simulation.host import HANDLES, MAIN, WEATHER, Host, expect_damage, me
from tests.simulation.oracle import Write, expect
from tests.simulation.writers import attempted, told

RETAINED_SHARE = 0.35  # of the runs with history and without chroniclers
CONSUMER = "consumer"
FOLLOWS_WITHIN_MS = 60_000  # beyond the age and two cuts: steps, and what clocks are off
ROUNDS_MAX = 200


def policy_of(seed: int) -> dict[str, Any]:
    """The policy of that run."""
    pick = random.Random(f"policy {seed}")
    policy: dict[str, Any] = {"age": pick.choice(("1s", "1s", "3s")), "cut_every": "1s"}
    if pick.random() < 0.5:
        policy["consumers"] = [CONSUMER]
        if pick.random() < 0.4:
            policy["consumers_max_age"] = "4s"
    return policy


def retainer(host: Host) -> None:
    """Sets the policy, lets its consumer read on, and runs it as maintenance does."""
    shard, is_set = host.open(MAIN), False
    while not host.run.stopping:  # it takes no operation from others
        try:
            if not is_set:
                shard.retain(policy_of(host.run.seed), confirm=True)
                is_set = True
            elif host.random.random() < 0.3:
                _read_on(host, shard)
        except (*WEATHER, Conflict):
            host.run.path("policy unanswered")
        except Corruption:
            expect_damage(host)
        _run(host, shard)
        host.sleep(0.3)


def _read_on(host: Host, shard: Shard) -> None:
    upper = host.run.truth(MAIN).state.upper.element or 0
    hold = shard.critical_reader(CONSUMER)
    if hold.since.element is not None and hold.since.element < upper:
        hold.downgrade_since(host.random.randint(hold.since.element, upper))
        host.run.path("consumer read on")


class _Noting(ForwardingTransport):
    """Tells the oracle which cut a truncation has, before it is sent."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.transport)
        self._host = host

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        if isinstance(command, c.Rewrite) and command.truncates is not None:
            task = self._host.run.world.scheduler.current
            assert task is not None
            task.local["write"].as_of = command.truncates - 1
        return super().apply(name, command, caller)


def _run(host: Host, shard: Shard) -> None:
    """One turn of the policy."""
    write = Write(0, "truncate", me(host), MAIN, [], by_policy=True)
    with attempted(host, write):
        try:
            done = run_retention(OneShard(_Noting(host), shard._transport.shard), MAIN, HANDLES)
        except (Unavailable, Overloaded) as error:
            if write.landed is not None:  # what comes after the truncation was refused
                raise Indeterminate("the policy has truncated, and does not know that it is done") from error
            raise
        found = done.truncated
        if found is None:
            write.answer = "refused"  # nothing was due
        else:
            told(write, c.Appended(found.lower, found.upper))
        host.run.path("policy truncated" if found is not None and found.changed else "policy at rest")
        host.run.oracle.paths["policy cut"] += done.cuts
        host.run.oracle.paths["policy passed a consumer"] += bool(done.passed)
        host.run.oracle.paths["policy held back"] += bool(done.held_by)


def check_retained(host: Host) -> None:
    """When all is at rest and the consumer has read on, everything goes that is old enough."""
    truth = host.run.truth(MAIN)
    policy = truth.state.settings.rows
    if policy is None or policy.age_ms is None or truth.state.upper.element is None or truth.state.since.is_empty:
        return
    shard, began_ms = host.open(MAIN), host.run.oracle.clock()
    for _ in range(ROUNDS_MAX):
        if policy.consumers:
            hold = shard.critical_reader(CONSUMER)
            hold.downgrade_since(max(truth.state.upper, hold.since))
        _run(host, shard)
        facts, now_ms = facts_of(truth.state), host.run.oracle.clock()
        if facts.upper <= facts.since:  # a consumer has read all of a shard without history: the next write goes on
            host.run.path("policy waits for a write")
            return
        if not facts.ahead and facts.upper.element == facts.newest[1]:
            break
        within = policy.age_ms + 2 * policy.cut_every_ms + host.run.oracle.clocks_off_ms + FOLLOWS_WITHIN_MS
        expect(now_ms - began_ms <= within, "retained", f"{facts} does not come to rest within {now_ms - began_ms} ms")
        at_ms = next_ms(facts, now_ms)
        host.run.world.scheduler.sleep(1.0 if at_ms is None else max(0.5, (at_ms - now_ms) / 1000))
    left = {row: count for row, count in truth.contents((truth.state.upper.element or 1) - 1).items() if count > 0}
    expect(not left, "retained", f"{sorted(left.items(), key=repr)[:3]} stay by {policy}, and all is old")
    host.run.path("policy followed")


# --- broken builds


def policy_by_its_own_clock() -> Broken:
    """A policy goes by the clock of who commits, whether the blob store agrees with it or not."""
    real = policy_and_erasure_progress.take_cuts

    def read(state: State, command: c.ReadRetention, context: Any) -> Any:
        return state, c.RetentionIs(facts_of(state), context.now_ms, None)

    def take(state: State, command: c.TakeCuts, context: Any) -> Any:
        try:
            return real(state, command, context)
        except Unavailable:
            return state, c.CutsTaken(0)

    return every(transition(c.ReadRetention, read), transition(c.TakeCuts, take))


def policy_passes_a_consumer() -> Broken:
    """Whoever has not read what goes is not asked."""
    return patch.object(retention_plan, "behind", lambda facts, time: ())


def policy_by_the_newest_cut() -> Broken:
    """It truncates by the newest cut, not by the newest one that is old enough."""
    real = retention_plan._wanted

    def wanted(facts: Any, policy: Any, now_ms: int) -> Any:
        return real(facts, policy, now_ms + (policy.age_ms or 0))

    return patch.object(retention_plan, "_wanted", wanted)


BROKEN = (policy_by_its_own_clock, policy_passes_a_consumer, policy_by_the_newest_cut)
