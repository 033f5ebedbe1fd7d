"""What a location costs, for people: the prices, what is kept, what was written, shards, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from persist.cli.inspect_table import finding_line
from persist.cli.screen import plain
from persist.cost.document import CostDocument
from persist.cost.priced import (
    BUDGET,
    HELD_KINDS,
    BudgetTold,
    CompactionTold,
    DayTold,
    HeldTold,
    LocationCost,
    MeteredTold,
    RatesTold,
    ShardCost,
    WrittenTold,
)
from persist.cost.prices import Prices
from persist.cost.tally import PUT_KINDS

GAP = "  "
FIGURES = 3  # of a sum of money
PLACES_MAX = 9
SHARD_HEADS = (
    "shard",
    "a month",
    "commits",
    "rows",
    "bytes added",
    "PUTs",
    "bytes put",
    "deleted",
    "cost",
    "whole",
    "PUTs, about",
)


def lines(document: CostDocument, *, by_day: bool) -> Iterator[str]:
    """The answer, line by line, each with its line feed."""
    yield from (f"{plain(line)}\n" for line in _lines(document, by_day))


def _lines(document: CostDocument, by_day: bool) -> Iterator[str]:
    prices = document.prices
    yield f"prices: {prices.name} ({prices.source})"
    if document.location is not None and document.window is not None:
        window, location = document.window, document.location
        yield f"window: {window.lower} to {window.upper} ({window.days:g} days)"
        yield ""
        yield from _kept(location, prices)
        yield ""
        yield from _written(location.written, prices)
        yield ""
        yield from _shards(document.shards, prices, by_day)
        yield ""
        yield from _sums(location, prices)
    if document.metered is not None:
        yield ""
        yield from _metered(document.metered, prices)
    for finding in document.findings.told():
        yield finding_line(finding.to_json())


def money(value: float, prices: Prices) -> str:
    """A sum with three figures, and never as a power of ten."""
    places = 2
    while places < PLACES_MAX and value and abs(value) < 10 ** (FIGURES - 1 - places):
        places += 1
    text = f"{value:,.{places}f}"
    return f"${text}" if prices.currency == "USD" else f"{text} {prices.currency}"


def _kept(location: LocationCost, prices: Prices) -> Iterator[str]:
    held = location.held
    rows = [(kind, *_room(held, kind, prices)) for kind in (*HELD_KINDS[1:], "orphans") if getattr(held, kind).blobs]
    blobs, size = held.total.blobs, held.total.bytes
    if location.beside is not None:
        beside = location.beside
        beside_size = beside.kept.bytes + beside.unfinished.bytes
        blobs, size = blobs + beside.kept.blobs, size + beside_size
        month = money(beside.month_cost, prices)
        rows.append(("of no shard", str(beside.kept.blobs), str(beside_size), month))
    if prices.log_month:
        of_log = str(location.log_entries), str(location.log_bytes)
        rows.append(("log store", *of_log, money(prices.log_month, prices)))
    rows.append(("all", str(blobs), str(size), money(location.month_cost, prices)))
    yield from _table(("kept", "blobs", "bytes", "a month"), rows)


def _room(held: HeldTold, kind: str, prices: Prices) -> tuple[str, str, str]:
    room = getattr(held, kind)
    return str(room.blobs), str(room.bytes), money(prices.month(room.bytes), prices)


def _written(written: WrittenTold, prices: Prices) -> Iterator[str]:
    rows = []
    for kind in PUT_KINDS:
        puts = getattr(written, kind)
        if puts.blobs:
            rows.append((kind, str(puts.blobs), str(puts.bytes), str(puts.requests), money(puts.cost, prices)))
    rows.append(("all", *_puts(written), money(written.cost, prices)))
    yield from _table(("written", "blobs", "bytes", "PUTs", "cost"), rows)


def _puts(written: WrittenTold) -> tuple[str, str, str]:
    kinds = [getattr(written, kind) for kind in PUT_KINDS]
    return (
        str(sum(one.blobs for one in kinds)),
        str(sum(one.bytes for one in kinds)),
        str(sum(one.requests for one in kinds)),
    )


def _shards(shards: Sequence[ShardCost], prices: Prices, by_day: bool) -> Iterator[str]:
    if not by_day:
        yield from _table(SHARD_HEADS, [_shard(one, prices) for one in shards])
        return
    days = [(one.shard, day) for one in shards for day in one.days]
    heads = (SHARD_HEADS[0], "day", *SHARD_HEADS[2:-1])
    yield from _table(heads, [_day(name, day, prices) for name, day in days])


def _shard(one: ShardCost, prices: Prices) -> tuple[str, ...]:
    month = money(one.held.month_cost, prices)
    return (one.shard, month, *_did(one.written, prices), "yes" if one.is_whole else "at least", str(one.puts))


def _day(name: str, day: DayTold, prices: Prices) -> tuple[str, ...]:
    return (name, day.day, *_did(day.written, prices), "yes" if day.is_whole else "at least")


def _did(written: WrittenTold, prices: Prices) -> tuple[str, ...]:
    _, size, requests = _puts(written)
    counts = (written.commits, written.rows, written.bytes, requests, size, written.deleted)
    return (*map(str, counts), money(written.cost, prices))


def _sums(location: LocationCost, prices: Prices) -> Iterator[str]:
    part = location.whole_shards < location.shards
    least = "about " if part else ""
    yield from _rates(location.gb, prices)
    yield from _compaction(location.compaction, prices)
    yield f"a day without work costs {money(location.kept_day_cost, prices)} for what is kept"
    day, year = money(location.day_cost, prices), money(location.year_cost, prices)
    yield f"a day as in the window costs {least}{day}, a year {year}"
    yield from _hundred(location.hundred, prices)
    if part:
        count, puts = location.shards - location.whole_shards, money(location.puts_cost, prices)
        yield f"{count} of {location.shards} shards did at least what is counted: what was collected leaves no trace"
        yield f"by their commit history it was about {location.puts} PUTs ({puts})"


def _hundred(found: BudgetTold, prices: Prices) -> Iterator[str]:
    bought = [
        None if found.gb_kept is None else f"{_few(found.gb_kept)} GB kept",
        None if found.puts is None else f"{_few(found.puts)} PUTs",
        None if found.gb_written is None else f"{_few(found.gb_written)} GB written as here",
        None if found.locations is None else f"{_few(found.locations)} such locations",
    ]
    told = ", or ".join(one for one in bought if one is not None)
    yield f"{money(BUDGET, prices)} a year buy {told or 'all that is wanted'}"


def _few(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _rates(gb: RatesTold, prices: Prices) -> Iterator[str]:
    if gb.written is not None:
        yield f"a GB added by writers costs {money(gb.written, prices)} to write, merges and rollups included"
    if gb.read is not None:
        yield f"a GB read costs at least {money(gb.read, prices)}"


def _compaction(found: CompactionTold, prices: Prices) -> Iterator[str]:
    wrote, read = found.wrote, found.read
    put = f"{_count(wrote.requests, 'PUT')} of {wrote.bytes} bytes"
    yield f"merges cost {money(found.cost, prices)}: {put}; {_count(read.blobs, 'blob')} of {read.bytes} bytes read"
    if found.pays_after_reads is not None:
        saves = f"{_count(found.fewer_gets, 'GET')} ({money(found.saves_a_read, prices)})"
        yield f"they save a read of all rows {saves}, and pay after {_count(found.pays_after_reads, 'such read')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _metered(found: MeteredTold, prices: Prices) -> Iterator[str]:
    since = "since they began" if found.seconds is None else f"in {found.seconds:.0f} s"
    yield f"counted by {', '.join(found.sources)} {since}"
    rows = [(one.kind, str(one.requests), str(one.bytes), money(one.cost, prices)) for one in found.requests]
    sums = [str(sum(getattr(one, name) for one in found.requests)) for name in ("requests", "bytes")]
    rows.append(("all", sums[0], sums[1], money(found.cost, prices)))
    yield from _table(("asked", "requests", "bytes", "cost"), rows)
    if found.day_cost is not None:
        yield f"a day at this rate costs {money(found.day_cost, prices)}"
    if found.gb.written is not None:
        yield f"a GB put cost {money(found.gb.written, prices)}"
    if found.gb.read is not None:
        yield f"a GB got cost {money(found.gb.read, prices)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table whose first column is of words, the others of figures at the right."""
    widths = [max(len(row[place]) for row in (heads, *rows)) for place in range(len(heads))]
    for row in (heads, *rows):
        first, *more = (
            cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in _cells(row, widths)
        )
        yield GAP.join((first, *more)).rstrip()


def _cells(row: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[int, tuple[str, int]]]:
    yield from enumerate(zip(row, widths, strict=True))
