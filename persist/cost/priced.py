"""The records of an answer: counts, and what they cost by a table of prices.

Every `cost` is in the currency of the table. A month is a twelfth of a year.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from persist.cost.metered import KINDS, Metered
from persist.cost.prices import GB, Prices
from persist.cost.tally import PUT_KINDS, Puts, Tally
from persist.inspect.records import Told
from persist.inspect.usage import LocationUsage, Room, UsageTold
from persist.parts.files import WHOLE_BYTES_MAX
from persist.parts.straight import FETCH_BYTES

YEAR_DAYS, MONTHS = 365, 12
BUDGET = 100.0
DAY_S = 86_400
DIGITS = 9  # behind the point of what is told
DELETED_AT_ONCE = 500  # blobs in one request, as collectors ask
HELD_KINDS = ("total", "live", "history", "index", "merging", "rollups", "lent", "held", "waiting", "unknown")
MERGED_KINDS = ("flushed", "compacted", "bundles")


@dataclass(frozen=True, slots=True)
class PutsTold(Told):
    """Blobs that were put. `requests` are worked out of their sizes; `unsized` are gone, and count as 0 bytes."""

    blobs: int
    bytes: int
    requests: int
    unsized: int
    cost: float


@dataclass(frozen=True, slots=True)
class WrittenTold(Told):
    """What was written in a stretch of time. `rows` and `bytes` are those that writers added, as they are encoded.

    `parts` are blobs of writers, `flushed` small merges by who commits, `compacted` merges by workers, `index`
    everything else that a State names. `deleted` blobs have left and are not there any more.
    """

    commits: int
    merges: int
    rows: int
    bytes: int
    parts: PutsTold
    flushed: PutsTold
    compacted: PutsTold
    bundles: PutsTold
    rollups: PutsTold
    index: PutsTold
    deleted: int
    cost: float


@dataclass(frozen=True, slots=True)
class DayTold(Told):
    """A day, UTC. `is_whole`: nothing of it is left out; else at least so much was done."""

    day: str
    is_whole: bool
    written: WrittenTold


@dataclass(frozen=True, slots=True)
class HeldTold(Told):
    """What is kept, by the kinds of `persist inspect usage`. `month_cost` is that of a month of it, as it is."""

    total: Room
    live: Room
    history: Room
    index: Room
    merging: Room
    rollups: Room
    lent: Room
    held: Room
    waiting: Room
    orphans: Room
    unknown: Room
    month_cost: float


@dataclass(frozen=True, slots=True)
class CompactionTold(Told):
    """What merges cost and save. `wrote` is counted; `read` is worked out: each blob that they took the place of, once.

    `cost` is of both. `fewer_gets` are the blobs that a read of all rows needs less than without them, `saves_a_read`
    what that saves each time; `pays_after_reads` so many of these pay for the merges (null: never).
    """

    merges: int
    wrote: PutsTold
    read: PutsTold
    cost: float
    fewer_gets: int
    saves_a_read: float
    pays_after_reads: int | None


@dataclass(frozen=True, slots=True)
class RatesTold(Told):
    """What a GB costs. `written` is of what writers add: all PUTs of the window (`puts`) for the bytes added in it.

    `read` is a lower bound, worked out of the mean size of a live blob: one request up to 1 MiB; beyond, one for the
    footer, and one for each 8 MiB. null: there is nothing to work it out of.
    """

    written: float | None
    read: float | None


@dataclass(frozen=True, slots=True)
class ShardCost(Told):
    """A shard. `whole_from` is from when on what it wrote is counted as a whole; before that, at least so much.

    `puts` are the PUTs of the window: those that are counted, and where something is left out those that are worked out
    of the commit history as well. `puts_cost` is theirs.
    """

    shard: str
    whole_from: str | None
    is_whole: bool
    held: HeldTold
    written: WrittenTold
    puts: int
    puts_cost: float
    compaction: CompactionTold
    gb: RatesTold
    days: list[DayTold]


@dataclass(frozen=True, slots=True)
class BesideTold(Told):
    """What belongs to no shard: what was published, bindings, blobs of shards without a log, whatever else lies there.

    `unfinished` is what puts have left that did not end: stores bill it, and no listing shows it.
    """

    kept: Room
    unfinished: Room
    month_cost: float
    written: PutsTold


@dataclass(frozen=True, slots=True)
class BudgetTold(Told):
    """What 100 of the currency a year buy: GB kept for the year, or GB written, or PUTs, or so many such locations."""

    gb_kept: float | None
    gb_written: float | None
    puts: float | None
    locations: float | None


@dataclass(frozen=True, slots=True)
class LocationCost(Told):
    """All shards together, and what lies beside them (null: a pattern was given).

    `kept_day_cost` is what a day costs in which nobody does anything: storage and log store. `day_cost` adds what was
    written (`puts`), as in the window. `year_cost` is 365 of them. `whole_shards` are counted as a whole.
    """

    shards: int
    whole_shards: int
    held: HeldTold
    beside: BesideTold | None
    log_entries: int
    log_bytes: int
    written: WrittenTold
    puts: int
    puts_cost: float
    compaction: CompactionTold
    gb: RatesTold
    month_cost: float
    kept_day_cost: float
    day_cost: float
    year_cost: float
    hundred: BudgetTold


@dataclass(frozen=True, slots=True)
class RequestsTold(Told):
    """Requests of a kind as the store bills them, as a process has counted them."""

    kind: str
    requests: int
    bytes: int
    cost: float


@dataclass(frozen=True, slots=True)
class MeteredTold(Told):
    """What processes have counted themselves: in `seconds` (null: since they began).

    `day_cost` is that of a day at this rate (null: not known). `gb` is measured: all PUTs and LISTs for the bytes put,
    all GETs for the bytes got.
    """

    sources: list[str]
    seconds: float | None
    requests: list[RequestsTold]
    commits: int
    cost: float
    day_cost: float | None
    gb: RatesTold


def told(value: float) -> float:
    """A cost as it is told: what lies beyond the ninth digit is noise."""
    return round(value, DIGITS)


def puts_told(puts: Puts, prices: Prices) -> PutsTold:
    cost = told(prices.puts(puts.requests, puts.bytes))
    return PutsTold(puts.blobs, puts.bytes, puts.requests, puts.unsized, cost)


def written_told(tally: Tally, prices: Prices) -> WrittenTold:
    def of(kind: str) -> PutsTold:
        return puts_told(tally.of(kind), prices)

    return WrittenTold(
        commits=tally.commits,
        merges=tally.merges,
        rows=tally.rows,
        bytes=tally.bytes,
        parts=of("parts"),
        flushed=of("flushed"),
        compacted=of("compacted"),
        bundles=of("bundles"),
        rollups=of("rollups"),
        index=of("index"),
        deleted=tally.deleted,
        cost=told(written_cost(tally, prices)),
    )


def written_cost(tally: Tally, prices: Prices) -> float:
    """PUTs of every kind, and commits. Deletes go by hundreds a request, where a store bills them at all."""
    puts = tally.of(*PUT_KINDS)
    deletes = prices.requests("delete", math.ceil(tally.deleted / DELETED_AT_ONCE))
    return prices.puts(puts.requests, puts.bytes) + deletes + tally.commits * prices.log_commits / 1_000


def held_told(usage: UsageTold, prices: Prices) -> HeldTold:
    orphans = usage.orphans.hour + usage.orphans.day + usage.orphans.older
    return held_of({**{kind: getattr(usage, kind) for kind in HELD_KINDS}, "orphans": orphans}, prices)


def held_of(rooms: dict[str, Room], prices: Prices) -> HeldTold:
    return HeldTold(**rooms, month_cost=told(prices.month(rooms["total"].bytes)))


def held_together(all_held: list[HeldTold], prices: Prices) -> HeldTold:
    kinds = (*HELD_KINDS, "orphans")
    return held_of({kind: sum((getattr(one, kind) for one in all_held), Room()) for kind in kinds}, prices)


def compaction_told(tally: Tally, read: Puts, prices: Prices) -> CompactionTold:
    """`read` are the blobs that merges took the place of."""
    wrote = tally.of(*MERGED_KINDS)
    read_cost = prices.gets(read.blobs, read.bytes)
    cost = prices.puts(wrote.requests, wrote.bytes) + read_cost
    fewer = read.blobs - wrote.blobs
    saves = prices.gets(fewer, 0)
    return CompactionTold(
        merges=tally.merges,
        wrote=puts_told(wrote, prices),
        read=PutsTold(read.blobs, read.bytes, read.blobs, read.unsized, told(read_cost)),
        cost=told(cost),
        fewer_gets=fewer,
        saves_a_read=told(saves),
        pays_after_reads=math.ceil(cost / saves) if saves > 0 else None,
    )


def rates_told(tally: Tally, puts: int, live: Room, prices: Prices) -> RatesTold:
    """`puts` are the PUTs of the same stretch of time as the tally, those included that it does not count."""
    cost = did_cost(tally, puts, prices)
    written = told(cost / tally.bytes * GB) if tally.bytes else None
    read = told(prices.gets(gets_of(live), live.bytes) / live.bytes * GB) if live.bytes else None
    return RatesTold(written, read)


def gets_of(live: Room) -> int:
    """The requests by which live blobs are read once, as `RatesTold` says."""
    if live.bytes <= live.blobs * WHOLE_BYTES_MAX:
        return live.blobs
    return live.blobs + max(live.blobs, live.bytes // FETCH_BYTES)


def did_cost(tally: Tally, puts: int, prices: Prices) -> float:
    """What was counted, and the PUTs that were not."""
    return written_cost(tally, prices) + prices.requests("put", puts - tally.of(*PUT_KINDS).requests)


def beside_told(usage: LocationUsage, tally: Tally, prices: Prices) -> BesideTold | None:
    """None: only some shards were looked at."""
    rooms = (usage.published, usage.bindings, usage.of_no_shard, usage.other)
    unfinished = usage.unfinished
    if unfinished is None:
        return None
    kept = sum((room for room in rooms if room is not None), Room())
    month = told(prices.month(kept.bytes + unfinished.bytes))
    return BesideTold(kept, unfinished, month, puts_told(tally.of("index"), prices))


def hundred_told(year_cost: float, gb: RatesTold, prices: Prices) -> BudgetTold:
    def bought(each: float | None) -> float | None:
        return round(BUDGET / each, 3) if each else None

    return BudgetTold(
        gb_kept=bought(prices.gb_month * MONTHS),
        gb_written=bought(gb.written),
        puts=bought(prices.put / 1_000),
        locations=bought(year_cost),
    )


def metered_told(found: Metered, sources: list[str], seconds: float | None, prices: Prices) -> MeteredTold:
    requests = [
        RequestsTold(kind, found.requests[kind], found.bytes[kind], told(_metered_cost(found, kind, prices)))
        for kind in KINDS
    ]
    cost = sum(one.cost for one in requests) + found.commits * prices.log_commits / 1_000
    write = _metered_cost(found, "put", prices) + _metered_cost(found, "list", prices)
    put, got = found.bytes["put"], found.bytes["get"]
    gb = RatesTold(
        told(write / put * GB) if put else None,
        told(_metered_cost(found, "get", prices) / got * GB) if got else None,
    )
    day = told(cost / seconds * DAY_S) if seconds else None
    return MeteredTold(sources, seconds, requests, found.commits, told(cost), day, gb)


def _metered_cost(found: Metered, kind: str, prices: Prices) -> float:
    count, size = found.requests[kind], found.bytes[kind]
    if kind == "put":
        return prices.puts(count, size)
    return prices.gets(count, size) if kind == "get" else prices.requests(kind, count)


def read_by_merges(merged: dict[str, int | None]) -> Puts:
    """The blobs that merges took the place of, together."""
    known = [size for size in merged.values() if size is not None]
    return Puts(len(merged), sum(known), len(merged), len(merged) - len(known))
