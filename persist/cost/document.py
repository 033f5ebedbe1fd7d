"""The whole answer: what a location holds and did, and what processes have counted, priced by one table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from persist.cost import priced
from persist.cost.priced import DayTold, LocationCost, MeteredTold, ShardCost
from persist.cost.prices import Prices
from persist.cost.tally import DAY_MS, Puts, Tally, tally_of
from persist.cost.watching import Did, RestWatcher, ShardWatcher, Window
from persist.inspect.looking import Look
from persist.inspect.records import Findings, Told, instant
from persist.inspect.usage import LocationUsage, UsageTold, Watcher, usage_document

VERSION = 1  # of what `--json` prints


@dataclass(frozen=True, slots=True)
class WindowTold(Told):
    """The wall clocks `[lower, upper)` of which is told what was done, RFC 3339, UTC."""

    lower: str | None
    upper: str | None
    days: float


@dataclass
class CostDocument:
    """One answer. Without a look `window`, `location` and `shards` are empty, without metrics `metered` is."""

    prices: Prices
    window: WindowTold | None = None
    location: LocationCost | None = None
    shards: list[ShardCost] = field(default_factory=list)
    metered: MeteredTold | None = None
    findings: Findings = field(default_factory=Findings)

    def pieces(self) -> Iterator[str]:
        """The document as JSON on one line, with its line feed."""
        head = {"persist": "cost", "version": VERSION, "prices": self.prices.to_json()}
        for name in ("window", "location", "metered"):
            record: Told | None = getattr(self, name)
            head[name] = None if record is None else record.to_json()
        yield json.dumps(head)[:-1]
        yield ', "shards": ['
        for number, shard in enumerate(self.shards):
            yield f"{', ' if number else ''}{json.dumps(shard.to_json())}"
        yield f'], "findings": {json.dumps([one.to_json() for one in self.findings.told()])}}}\n'


@dataclass(slots=True)
class _Shard:
    """A shard, with the counts that are added up for the location."""

    told: ShardCost
    written: Tally
    read: Puts


def cost_document(look: Look, pattern: str | None, days: float, prices: Prices) -> CostDocument:
    """What shards hold and did whose names match (None: all, and what else lies there), in so many days before now.

    Raises InvalidUsage, UnknownShard, Unavailable.
    """
    now_ms = look.clock.now_ms()
    # A blob may be made while this looks, by a clock that goes ahead of this one: it counts.
    window = Window(max(0, now_ms - int(days * DAY_MS)), now_ms + DAY_MS)
    watchers: dict[str, ShardWatcher] = {}
    rest = RestWatcher(window)

    def watcher_of(name: str | None) -> Watcher:
        return rest if name is None else watchers.setdefault(name, ShardWatcher(name, window))

    usage = usage_document(look, pattern, watcher_of)
    shards = []
    for row in cast("list[UsageTold]", list(usage.rows)):
        did = watchers.pop(row.shard or "").did(look, usage.findings)  # popped: its keys may be many
        shards.append(_shard(row, did, window, prices))
    location = _location(cast("LocationUsage", usage.about), shards, rest.tally, days, prices)
    told = WindowTold(instant(window.from_ms), instant(now_ms), days)
    return CostDocument(prices, told, location, [one.told for one in shards], findings=usage.findings)


def _shard(usage: UsageTold, did: Did, window: Window, prices: Prices) -> _Shard:
    written, read = tally_of(list(did.days.values())), priced.read_by_merges(dict(did.merged))
    days = [
        DayTold((instant(day * DAY_MS) or "")[:10], day * DAY_MS >= did.whole_from_ms, priced.written_told(one, prices))
        for day, one in did.days.items()
    ]
    return _Shard(
        ShardCost(
            shard=usage.shard or "",
            whole_from=instant(did.whole_from_ms),
            is_whole=did.whole_from_ms <= window.from_ms,
            held=priced.held_told(usage, prices),
            written=priced.written_told(written, prices),
            puts=did.puts,
            puts_cost=priced.told(prices.requests("put", did.puts)),
            compaction=priced.compaction_told(written, read, prices),
            gb=priced.rates_told(written, did.puts, usage.live, prices),
            days=days,
        ),
        written,
        read,
    )


def _location(usage: LocationUsage, shards: list[_Shard], rest: Tally, days: float, prices: Prices) -> LocationCost:
    held = priced.held_together([one.told.held for one in shards], prices)
    written = tally_of([one.written for one in shards])
    beside = priced.beside_told(usage, rest, prices)
    month = held.month_cost + prices.log_month + (0.0 if beside is None else beside.month_cost)
    kept_day = month * priced.MONTHS / priced.YEAR_DAYS
    puts = sum(one.told.puts for one in shards)
    did = priced.did_cost(written, puts, prices) + (0.0 if beside is None else beside.written.cost)
    gb = priced.rates_told(written, puts, held.live, prices)
    year = (kept_day + did / days) * priced.YEAR_DAYS
    return LocationCost(
        shards=len(shards),
        whole_shards=sum(one.told.is_whole for one in shards),
        held=held,
        beside=beside,
        log_entries=usage.log_entries,
        log_bytes=usage.log_bytes,
        written=priced.written_told(written, prices),
        puts=puts,
        puts_cost=priced.told(prices.requests("put", puts)),
        compaction=priced.compaction_told(written, sum((one.read for one in shards), Puts()), prices),
        gb=gb,
        month_cost=priced.told(month),
        kept_day_cost=priced.told(kept_day),
        day_cost=priced.told(kept_day + did / days),
        year_cost=priced.told(year),
        hundred=priced.hundred_told(year, gb, prices),
    )
