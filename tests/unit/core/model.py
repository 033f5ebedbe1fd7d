"""A naive shard: all updates in one list, frontiers as plain numbers (None = closed). Knows nothing of batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

K = TypeVar("K")
Update = tuple[str, int, int]  # key, time, diff
CLOSED = float("inf")  # as a frontier: beyond every time


class Refused(Exception):
    """The command is refused with the error of this kind."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass
class Writer:
    token: str = ""
    answer: tuple[float, float] = (0, 0)

    def again(self, token: str) -> tuple[float, float]:
        """The answer to a command that was seen before; only the most recent one may be asked again."""
        if self.token > token:
            raise Refused("invalid_usage")
        return self.answer


@dataclass
class Model:
    updates: list[Update] = field(default_factory=list)
    upper: float = 0
    since: float = 0
    writers: dict[str, Writer] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)  # writers that are gone: none of them comes back
    taken: set[float] = field(default_factory=set)  # times that inserts took
    readers: dict[str, float] = field(default_factory=dict)
    critical: dict[str, tuple[float, str]] = field(default_factory=dict)
    tombstone: bool = False
    fed: bool = False  # by `append`: then an erasure waits for the next time
    waiting: list[tuple[str, int]] = field(default_factory=list)  # what pending erasures will retract
    waits: int = 0  # pending erasures
    erased: float = 0  # the time of the last one: no new reader holds an earlier one

    def snapshot(self, as_of: int) -> dict[str, int]:
        """The multiset as of a time: what it holds how often."""
        return sums((key, diff) for key, time, diff in self.updates if time <= as_of)

    # --- writers

    def expire_writer(self, writer: str) -> None:
        is_dropped = self.tombstone or (self.upper == CLOSED and self.since == CLOSED)
        if self.writers.pop(writer, None) is not None or not is_dropped:
            self.retired.add(writer)

    def compare_and_append(
        self, writer: str, token: str, expected: float, upper: float, updates: list[Update]
    ) -> tuple[float, float]:
        known = self._writer(writer)
        if known.token >= token:
            return known.again(token)
        self._open()
        if self.upper != expected:
            raise Refused("upper_mismatch")
        if expected != upper:
            self._check_end(upper)
            self._push(known, token, upper, updates)
        self.writers[writer] = known
        return (expected, upper)

    def append(self, writer: str, token: str, lower: float, upper: float, updates: list[Update]) -> tuple[float, float]:
        known = self._writer(writer)
        if known.token >= token:
            return known.again(token)
        self._open()
        if any(lower <= time < upper for time in self.taken):
            raise Refused("upper_mismatch")
        if upper <= self.upper:
            return (lower, upper)
        if self.upper < lower:
            raise Refused("upper_mismatch")
        self._check_end(upper)
        self._push(known, token, upper, [update for update in updates if update[1] >= self.upper])
        self.fed = True
        known.answer = (lower, upper)
        self.writers[writer] = known
        return known.answer

    def insert_together(self, inserts: list[tuple[str, str, list[tuple[str, int]]]]) -> list[tuple[float, float] | str]:
        """Inserts that are committed together share the next time. Each has its answer, or the kind of its refusal."""
        time = self.upper
        answers: list[tuple[float, float] | str] = []
        for writer, token, rows in inserts:
            known = self.writers.get(writer, Writer())
            if self.tombstone:
                answers.append("unknown_shard")
            elif writer in self.retired:
                answers.append("expired")
            elif known.token > token:
                answers.append("invalid_usage")
            elif known.token == token:
                answers.append(known.answer)
            elif time == CLOSED:
                answers.append("unknown_shard" if self.since == CLOSED else "upper_mismatch")
            else:
                self.fed = False
                self._complete(time + 1)
                self.taken.add(time)
                self.updates += [(key, int(time), diff) for key, diff in rows]
                known.token, known.answer = token, (time, time + 1)
                self.writers[writer] = known
                answers.append(known.answer)
        return answers

    def advance_upper(self, upper: float) -> tuple[float, float]:
        self._open()
        if upper <= self.upper:
            return (upper, upper)
        self._check_end(upper)
        before = self.upper
        self._complete(upper)
        return (before, upper)

    def erasable(self) -> list[tuple[str, int]]:
        """The rows that an erasure may retract: those of the latest time, without what others will retract."""
        if self.upper in (0, CLOSED):
            return []
        there = sums((*self.snapshot(int(self.upper) - 1).items(), *self.waiting))
        return sorted((key, -count) for key, count in there.items())

    def erase(self, writer: str, token: str, force: bool, retracted: list[tuple[str, int]]) -> tuple[float, float]:
        known = self._writer(writer)
        if known.token >= token:
            return known.again(token)
        self._open()
        if self.upper == CLOSED:
            raise Refused("upper_mismatch")
        if self.upper == 0:
            raise Refused("invalid_usage")
        time = self.upper
        self.waiting += retracted
        self.waits += 1
        if force or not self.fed:
            self.taken.add(time)
            self._complete(time + 1)
        known.token, known.answer = token, (time, self.upper)
        self.writers[writer] = known
        return known.answer

    def _complete(self, upper: float) -> None:
        """The upper moves: what waits for the next time is retracted there, and what held earlier history lets go."""
        at, self.upper = self.upper, max(self.upper, upper)
        if not self.waits or at == self.upper:
            return
        self.updates += [(key, int(at), diff) for key, diff in self.waiting]
        self.waiting, self.waits, self.erased = [], 0, at
        holds = self._holds()
        if self.since != CLOSED and min(holds, default=0) != CLOSED:
            self.since = max(self.since, min([*holds, at]))

    def _push(self, writer: Writer, token: str, upper: float, updates: list[Update]) -> None:
        writer.token, writer.answer = token, (self.upper, upper)
        self.updates += updates
        self._complete(upper)

    def _writer(self, writer: str) -> Writer:
        self._alive()
        if writer in self.retired:
            raise Refused("expired")
        return self.writers.get(writer, Writer())

    # --- readers

    def register_reader(self, reader: str, since: float | None) -> float:
        self._open()
        if reader not in self.readers:
            earliest = max(self.since, self.erased)
            wanted = earliest if since is None else since
            if wanted < earliest:
                raise Refused("not_readable")
            self.readers[reader] = wanted
        return self.readers[reader]

    def expire_reader(self, reader: str) -> None:
        self.readers.pop(reader, None)

    def move_hold(self, reader: str, since: float) -> tuple[float, float]:
        self._open()
        if reader not in self.readers:
            raise Refused("expired")
        if since != CLOSED:
            self._check_reached(self.readers[reader], since)
        self.readers[reader] = max(self.readers[reader], since)
        return (self.readers[reader], self.since)

    def downgrade(self, reader: str, since: float) -> tuple[float, float]:
        self.move_hold(reader, since)
        self._recompute()
        return (self.readers[reader], self.since)

    def register_critical(self, reader: str, opaque: str) -> tuple[float, str, float]:
        self._open()
        since, held = self.critical.setdefault(reader, (max(self.since, self.erased), opaque))
        return (since, held, self.since)

    def downgrade_critical(
        self, reader: str, expected: str, opaque: str, since: float, force: bool
    ) -> tuple[float, str, float]:
        self._open()
        if reader not in self.critical:
            raise Refused("expired")
        held_since, held = self.critical[reader]
        retried = held == opaque != expected and since <= held_since
        if not retried:
            if held != expected:
                raise Refused("opaque_mismatch")
            if not force:
                self._check_reached(held_since, since)
            if since > held_since and since == self.upper == CLOSED:
                raise Refused("invalid_usage")
            self.critical[reader] = (max(held_since, since), opaque)
            self._recompute()
        return (*self.critical[reader], self.since)

    def expire_critical(self, reader: str, expected: str) -> None:
        if reader in self.critical:
            if self.critical[reader][1] != expected:
                raise Refused("opaque_mismatch")
            del self.critical[reader]

    def _check_reached(self, held: float, since: float) -> None:
        if max(held, self.upper) < since:
            raise Refused("invalid_usage")

    def _recompute(self) -> None:
        """A lease holds at most the latest complete time, and at the end nothing. Only a drop closes both frontiers."""
        held = min(self._holds(), default=self.since)
        if not held == self.upper == CLOSED:
            self.since = max(self.since, held)

    def _holds(self) -> list[float]:
        leased = [min(since, max(self.upper - 1, 0)) for since in self.readers.values() if since != CLOSED]
        return [*leased, *(since for since, _ in self.critical.values())]

    # --- the end

    def _check_end(self, upper: float) -> None:
        """Only a drop closes both frontiers."""
        if upper == self.since == CLOSED:
            raise Refused("invalid_usage")

    def drop(self, force: bool) -> None:
        if self.upper == self.since == CLOSED:
            return
        holds = [*self.readers.values(), *(since for since, _ in self.critical.values())]
        if not force and any(since != CLOSED for since in holds):
            raise Refused("conflict")
        self.upper = self.since = CLOSED
        self.waiting, self.waits = [], 0
        self.readers.clear()
        self.critical.clear()

    def _alive(self) -> None:
        if self.tombstone:
            raise Refused("unknown_shard")

    def _open(self) -> None:
        """Not dropped: what both frontiers have passed is nobody's any more."""
        if self.upper == self.since == CLOSED:
            raise Refused("unknown_shard")

    def recreated_again(self) -> None:
        """A retry names the life that has ended."""
        raise Refused("unknown_shard")

    def recreate(self) -> None:
        """The next life of the name."""
        self.__init__()  # type: ignore[misc]


def sums(rows: Iterable[tuple[K, int]]) -> dict[K, int]:
    """Sum of diffs per key, without those that cancel."""
    total: Counter[K] = Counter()
    for key, diff in rows:
        total[key] += diff
    return {key: diff for key, diff in total.items() if diff}
