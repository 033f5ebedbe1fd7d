"""The journal of a crash test as a history, and what must be true of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.actor import SHARD, Ranges
from tests.simulation.history import History, Read
from tests.simulation.oracle import Write, expect

Line = dict[str, Any]


@dataclass
class Account:
    """What the clients of one run were told. `reads` are the names of the writes that each time showed."""

    history: History = field(default_factory=History)
    writes: dict[str, Write] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    reads: dict[int, Ranges] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, journal: Path) -> Account:
        """Raises Violation where somebody met what must never happen."""
        account = cls()
        record: dict[str, Callable[[Line], None]] = {
            "write": account._write,
            "answer": account._answer,
            "view": account._view,
            "read": account._read,
        }
        with journal.open() as lines:
            for text in lines:
                line = json.loads(text)
                account.counts[line["what"]] += 1
                expect(line["what"] != "broken", "broken", f"{line['who']} met {line.get('error')}")
                if line["what"] in record:
                    record[line["what"]](line)
        return account

    def check(self) -> None:
        """The checks of the simulation that need no oracle, and every read against what was acknowledged."""
        self.history.check()
        for as_of, names in self.reads.items():
            self._check_read(as_of, names)

    def check_held(self, held: Counter[str]) -> None:
        """What the shard holds in the end, as rows by write: all that was acknowledged, nothing refused, no halves."""
        acknowledged = [name for name, write in self.writes.items() if write.answer == "ok"]
        lost = [name for name in acknowledged if held[name] != self.sizes[name]]
        expect(not lost, "lost", f"acknowledged and lost: {lost}")
        refused = [name for name, write in self.writes.items() if write.answer == "refused" and held[name]]
        expect(not refused, "rejected", f"refused and there: {refused}")
        halves = [name for name, rows in held.items() if rows != self.sizes[name]]
        expect(not halves, "atomic", f"there by halves: {halves}")

    def _check_read(self, as_of: int, names: Ranges) -> None:
        for name, write in self.writes.items():
            if write.answer is None or write.answer == "unknown":
                continue
            seen = _holds(names, name)
            if write.answer == "refused":
                expect(not seen, "rejected", f"{name} was refused, but a read as of {as_of} shows it")
                continue
            assert write.told is not None
            assert write.told[0] is not None
            due = write.told[0] <= as_of
            expect(seen == due, "complete", f"{name} landed in {write.told}; a read as of {as_of} shows it: {seen}")

    def _write(self, line: Line) -> None:
        asked = line["lower"], line["upper"]
        kind = "insert" if asked == (None, None) else "compare_and_append"
        write = Write(len(self.writes) + 1, kind, line["who"], SHARD, [], invoked=line["ns"])
        if kind == "compare_and_append":
            write.lower, write.upper = asked
        self.writes[line["name"]] = write
        self.sizes[line["name"]] = line["size"]
        self.history.writes.append(write)

    def _answer(self, line: Line) -> None:
        write = self.writes[line["name"]]
        write.returned, write.answer = line["ns"], line["answer"]
        write.actual = line.get("actual")
        write.told = tuple(line["told"]) if "told" in line else None
        self.counts[line["answer"]] += 1
        if "why" in line:
            self.counts[line["why"]] += 1

    def _view(self, line: Line) -> None:
        self.history.uppers.append((SHARD, line["who"], line["invoked"], line["ns"], line["upper"]))
        self.history.sinces.append((SHARD, line["who"], line["invoked"], line["ns"], line["since"]))

    def _read(self, line: Line) -> None:
        as_of, names = line["as_of"], line["names"]
        rows = frozenset(((seed, first), last) for seed, spans in names.items() for first, last in spans)
        self.history.reads.append(Read(SHARD, as_of, line["who"], rows))
        self.reads[as_of] = names
        self.counts["listened"] += "listened" in line


def _holds(names: Ranges, name: str) -> bool:
    seed, _, text = name.partition(".")
    number = int(text)
    return any(first <= number <= last for first, last in names.get(seed, ()))


__all__ = ["Account"]
