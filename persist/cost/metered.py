"""The requests that a server or a client has counted itself, as its metrics tell them.

A call of the blob store counts as one request. What the S3 library repeats by itself, the pages of a listing beyond the
first, and the pieces of a large blob are not seen there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from persist.core.errors import InvalidUsage

CALLS, MOVED = "persist_store_calls_total", "persist_store_bytes_total"
# The kind by which a store bills what a blob store of persist is asked.
_BILLED = {"put": "put", "get": "get", "get_range": "get", "stat": "get", "list": "list", "delete": "delete"}
KINDS = ("put", "get", "list", "delete")
_SERIES = re.compile(r'(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\}')
# With a time behind the value, as the format allows.
_SAMPLE = re.compile(rf"(?P<series>{_SERIES.pattern})\s+(?P<value>\S+)(\s+-?\d+)?\s*")
_LABEL = re.compile(r'([a-z_]+)="([^"\\]*)"')


@dataclass(frozen=True, slots=True)
class Metered:
    """Requests to the blob store and their bytes by kind, and commits to the log store that won."""

    requests: Mapping[str, int]
    bytes: Mapping[str, int]
    commits: int

    def since(self, earlier: Metered) -> Metered:
        """What came after an earlier look. Raises InvalidUsage: the process began anew in between."""
        requests = {kind: self.requests[kind] - earlier.requests[kind] for kind in KINDS}
        moved = {kind: self.bytes[kind] - earlier.bytes[kind] for kind in KINDS}
        commits = self.commits - earlier.commits
        if min(*requests.values(), *moved.values(), commits) < 0:
            raise InvalidUsage("the later counts are below the earlier ones: the process has begun anew in between")
        return Metered(requests, moved, commits)


def metered(text: str, source: str) -> Metered:
    """The counts in the text of `GET /metrics`, or in the JSON of `Client.metrics()`. Raises InvalidUsage."""
    series = _of_json(text, source) if text.lstrip().startswith("{") else _of_text(text)
    requests, moved = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    commits, is_there = 0, False
    for name, value in series:
        found = _SERIES.fullmatch(name)
        if found is None or found["name"] not in (CALLS, MOVED):
            continue
        if not (math.isfinite(value) and 0 <= value < 2**63):
            raise InvalidUsage(f"{source:.200} tells {value} of {name:.100}, which is no count")
        is_there = True
        labels = dict(_LABEL.findall(found["labels"]))
        store, verb = labels.get("store"), labels.get("verb", "")
        if store == "blob" and verb in _BILLED:
            counts = requests if found["name"] == CALLS else moved
            counts[_BILLED[verb]] += int(value)
        elif store == "consensus" and verb == "compare_and_set" and labels.get("outcome") == "ok":
            commits += int(value) if found["name"] == CALLS else 0
    if not is_there:
        raise InvalidUsage(f"{source:.200} has no series {CALLS}: it is no text of /metrics, or nothing is metered")
    return Metered(requests, moved, commits)


def together(found: list[Metered]) -> Metered:
    """What several processes counted."""
    requests = {kind: sum(one.requests[kind] for one in found) for kind in KINDS}
    moved = {kind: sum(one.bytes[kind] for one in found) for kind in KINDS}
    return Metered(requests, moved, sum(one.commits for one in found))


def _of_text(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        if line.startswith((CALLS, MOVED)):
            sample = _SAMPLE.fullmatch(line)
            try:
                if sample is None:
                    raise ValueError("it is no sample")
                yield sample["series"], float(sample["value"])
            except ValueError as error:
                raise InvalidUsage(f"a line of metrics has no value: {line:.100}") from error


def _of_json(text: str, source: str) -> Iterator[tuple[str, float]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"{source:.200} is no JSON of Client.metrics()") from error
    for name, value in found.items():
        if name.startswith((CALLS, MOVED)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidUsage(f"{source:.200} tells no number of {name:.100}")
            try:
                yield name, float(value)
            except OverflowError as error:
                raise InvalidUsage(f"{source:.200} tells no number of {name:.100}") from error
