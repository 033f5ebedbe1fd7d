"""Policies of rows that run by themselves: in maintenance, and in the upkeep of embedded programs."""

from __future__ import annotations

from persist.client.by_drop import is_refused
from persist.client.embedded import EmbeddedTransport
from persist.client.ladder import due_rungs, outlived
from persist.client.maintaining import Maintain
from persist.client.past import HandleSettings
from persist.client.retaining import RetentionRun, next_turn_ms, run_retention
from persist.client.sharing import LeasePool
from persist.client.transport import OneShard, Transport
from persist.client.wall_clock import instant_ms
from persist.commit.location import Location
from persist.core.column_plan import has_to_look
from persist.core.marks import point_at
from persist.core.retention_plan import Facts, facts_of, plan, step_ms, wanted_cuts

AGAIN_S = 1.0  # the least after which a shard is looked at again
HOUR_MS = 3_600_000
KNOWN_MAX = 100_000  # shards of which it is remembered when they were last asked


class Keeper:
    """Does what policies of rows ask for, and tells when there is something to do again.

    Whether anything is due is told by the State that is known here, without a statement. A wrong clock of this process
    only makes it ask too often: what goes is decided by a checked one.
    """

    def __init__(self, location: Location, transport: Transport) -> None:
        self._location = location
        self._transport = transport
        self._settings = HandleSettings()
        self._due: dict[str, float] = {}
        self._cut: dict[str, int] = {}  # the last instant that was asked for: to ask for it again is in vain

    def run(self, name: str) -> tuple[RetentionRun | None, float | None]:
        """What a run came to (None: nothing was due), and in how many seconds to look again though nothing moves.

        None: not before the shard moves. Raises what `run_retention` does.
        """
        state, now_s = self._location.machine(name).state(), self._location.clock.monotonic()
        policy, now_ms = state.settings.rows, self._location.clock.now_ms()
        if policy is None or state.is_closed:
            return None, None
        facts = facts_of(state)
        if not self._may_be_due(name, facts, now_ms):
            at_ms = next_turn_ms(facts, now_ms)
            return None, None if at_ms is None else max(AGAIN_S, (at_ms - now_ms) / 1000)
        if (wait_s := self._due.get(name, now_s) - now_s) > 0:
            return None, wait_s
        if len(self._due) >= KNOWN_MAX:
            self._due.clear()
            self._cut.clear()
        self._due[name] = now_s + step_ms(policy) / 1000
        run = run_retention(OneShard(self._transport, state.shard_id), name, self._settings, by_hand=False)
        if run.at is not None:  # by that clock, which this process's own may be ahead of
            self._cut[name] = point_at(instant_ms("at", run.at), min(policy.cut_every_ms, HOUR_MS))
        return run, step_ms(policy) / 1000

    def _may_be_due(self, name: str, facts: Facts, now_ms: int) -> bool:
        instants = [*wanted_cuts(facts, now_ms), *(rung.at_ms for rung in due_rungs(facts, now_ms))]
        if max(instants, default=0) > self._cut.get(name, 0):
            return True
        due = plan(facts, now_ms).due
        if due is not None and not (facts.drops and is_refused(self._location.machine(name).state(), due.cut.upper)):
            return True
        return bool(outlived(facts)) or has_to_look(facts, now_ms)


def kept_by_itself(location: Location, maintain: Maintain) -> EmbeddedTransport:
    """A transport of an embedded program whose small reads share leases.

    Its upkeep runs the policies of the shards to which it commits.

    That is where its location collects: then no other process may be there to do it.
    """
    if location.settings.collects:  # by a transport of its own: nothing but its users keeps the other one alive
        location.retain_with(Keeper(location, EmbeddedTransport(location)).run)
    made = EmbeddedTransport(location, maintain)
    made.leases = LeasePool(location.clock)
    return made
