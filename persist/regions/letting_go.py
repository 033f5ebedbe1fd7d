"""What regions hold at home: shown with its age, and let go by an operator.

A region holds by leased readers that are called after it (`holding.py`). Who still reads there is told Expired once
home has deleted what it needs, never fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from persist.commit.location import Location
from persist.core import commands as c
from persist.core.antichain import Antichain
from persist.core.errors import UnknownShard
from persist.core.ids import ReaderId
from persist.regions.holding import PURPOSE


@dataclass(frozen=True, slots=True)
class RegionHold:
    """A hold of `region` on a shard: `since`, and version `seqno`, of a shard that is at `upper`.

    `silent_s`: for so long, at least, home has not heard of it, as far as commits tell; `lapses_s`: in so long it ends.
    """

    shard: str
    region: str
    reader: ReaderId
    since: Antichain
    upper: Antichain
    seqno: int
    silent_s: float
    lapses_s: float

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        told: dict[str, Any] = {"shard": self.shard, "region": self.region, "reader": str(self.reader)}
        told |= {"since": self.since.to_json(), "upper": self.upper.to_json(), "version": self.seqno}
        return {**told, "silent_seconds": self.silent_s, "lapses_in_seconds": self.lapses_s}


def held_by_regions(location: Location, region: str | None = None) -> Iterator[RegionHold]:
    """What regions, or this one, hold of the shards here, by name. Writes nothing. Raises Unavailable."""
    for name in location.all_names(with_dropped=False):
        machine = location.machine(name)
        try:
            state = machine.refresh()
        except UnknownShard:  # dropped meanwhile
            continue
        now_ms = machine.lease_now_ms(state)
        for reader, held in sorted(state.leased_readers.items()):
            if not held.purpose.startswith(PURPOSE) or region not in (None, held.purpose.removeprefix(PURPOSE)):
                continue
            silent_s, lapses_s = (now_ms - held.heartbeat_ms) / 1000, (held.lapses_ms - now_ms) / 1000
            yield RegionHold(
                name, held.purpose.removeprefix(PURPOSE), reader, held.since, state.upper, int(held.seqno),
                max(0.0, silent_s), max(0.0, lapses_s),
            )  # fmt: skip


def let_go(location: Location, region: str) -> list[RegionHold]:
    """End every hold of this region; what it held. A region that is alive takes them anew when it reads next.

    Repeating it is safe. Raises Unavailable, ReadOnly (another home has taken over).
    """
    found = list(held_by_regions(location, region))
    for hold in found:
        location.machine(hold.shard).apply(c.ExpireReader(hold.reader))
    return found
