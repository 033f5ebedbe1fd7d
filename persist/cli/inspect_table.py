"""Answers of an inspection for people: what holds for the whole, a table of rows, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from persist.cli.screen import plain

ALIGNED_ROWS_MAX = 1_000  # by which the widths of columns are chosen; later rows may be wider
CELL_CHARS_MAX = 400
GAP = "  "
FRONTIERS = ("since", "upper", "lower")  # where nothing within is the closed frontier

Row = Mapping[str, Any]


def lines(about: Row | None, rows: Iterable[Row]) -> Iterator[str]:
    """What is told of the whole, a line a field, then the table. Columns that are empty in all rows are left out."""
    about = dict(about or {})
    shown = about.pop("shown", ())
    for name, value in _flat(about):
        yield plain(f"{name}: {value}")
    yield from _table(rows, follows=bool(about))
    yield from _table(shown, follows=True)


def _table(rows: Iterable[Row], *, follows: bool) -> Iterator[str]:
    """A table, after an empty line where it `follows` something. Of no rows there is none."""
    upcoming = iter(rows)
    first = [_cells(row) for row in islice(upcoming, ALIGNED_ROWS_MAX)]
    if not first:
        return
    if follows:
        yield ""
    more = next(upcoming, None)
    known = dict.fromkeys(name for row in first for name in row)  # a later build may tell more of some rows
    names = [name for name in known if more is not None or any(row.get(name, "-") not in ("-", "") for row in first)]
    numeric = {name for name in names if all(_is_number(row.get(name, "-")) for row in first)}
    widths = {name: max(len(name), *(len(row.get(name, "-")) for row in first)) for name in names}
    yield _line({name: name for name in names}, names, numeric, widths)
    for row in first:
        yield _line(row, names, numeric, widths)
    while more is not None:
        yield _line(_cells(more), names, numeric, widths)
        more = next(upcoming, None)


def log_line(entry: Row) -> str:
    """An entry of the log on one line."""
    if entry["finding"] is not None and entry["commit_id"] is None:
        return plain(f"v{entry['seqno']}  {entry['bytes']} bytes  DAMAGED: {entry['finding']}")
    said = entry["operations"] or entry["kinds"]
    told = [f"v{entry['seqno']}", entry["timestamp"] or "-", f"{entry['bytes']} bytes", ", ".join(said)]
    if entry["added"]:
        told.append("added " + ", ".join(map(_batch, entry["added"])))
    if entry["replaces"]:
        became = ", ".join(map(_batch, entry["replaced"])) or "nothing"
        told.append(f"{entry['replaces']} batches from the {entry['first']}th became {became}")
    if entry["gone"]:
        told.append(f"{entry['gone']} blobs left")
    if entry["finding"] is not None:
        told.append(f"DAMAGED: {entry['finding']}")
    return plain(GAP.join(told))


def finding_line(finding: Row) -> str:
    """What is wrong, on one line."""
    where = f"{finding['shard']}: " if finding["shard"] is not None else ""
    return plain(f"DAMAGED {where}{finding['what']}")


def _batch(batch: Row) -> str:
    return f"[{_text(batch['lower'])}, {_text(batch['upper'])}) of {batch['rows']} updates"


def _line(row: Mapping[str, str], names: list[str], numeric: set[str], widths: Mapping[str, int]) -> str:
    cells = ((row.get(name, "-"), widths[name], name in numeric) for name in names)
    return GAP.join(text.rjust(width) if right else text.ljust(width) for text, width, right in cells).rstrip()


def _cells(row: Row) -> dict[str, str]:
    """What is shown of a row, by columns. Names and values are of whoever wrote them: none may move the cursor."""
    return {plain(name): plain(text) for name, text in _flat(row)}


def _flat(row: Row) -> Iterator[tuple[str, str]]:
    """The fields as texts; those of an object within come one by one, and blobs with their bytes together."""
    for name, value in row.items():
        if isinstance(value, Mapping) and value.keys() == {"blobs", "bytes"}:
            yield name, f"{value['bytes']} ({value['blobs']})" if value["blobs"] else "-"
        elif isinstance(value, Mapping) and name in ("location", "orphans", "earlier", "later"):
            yield from ((f"{name}.{inner}", text) for inner, text in _flat(value))
        elif value == [] and name not in FRONTIERS:
            yield name, "-"
        else:
            yield name, _text(value)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return _list(value)[:CELL_CHARS_MAX]
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())[:CELL_CHARS_MAX]
    return str(value)


def _list(value: list[Any]) -> str:
    if not value:
        return "[]"
    if len(value) == 1 and isinstance(value[0], int):
        return str(value[0])
    return "; ".join(map(_text, value))


def _is_number(text: str) -> bool:
    return text == "-" or text.lstrip("-").replace(".", "", 1).isdecimal()
