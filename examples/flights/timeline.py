"""What happened when: looks at the shard while the demo runs, and marks of what was done to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from examples.flights import store
from persist.commit.location import Location
from persist.core.errors import PersistError

LOOK_S = 0.5
LOOKS_MAX = 2_000  # with more, every second one is forgotten
COMMIT, EVENT = "commit", "event"


@dataclass(frozen=True)
class Mark:
    """`kind` is COMMIT or EVENT; `at_s` is by the wall clock, in seconds since 1970."""

    at_s: float
    kind: str
    words: str


@dataclass
class Timeline:
    """Looks every LOOK_S within a `with`.

    `looks`: wall clock, since, upper, batches, bytes of these, and bytes of all blobs.
    """

    look: Callable[[], Sequence[int]]
    looks: list[list[float]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    heard: list[list[float]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)

    def mark(self, kind: str, words: str) -> None:
        self.marks.append(Mark(time.time(), kind, words))

    def to_json(self) -> dict[str, Any]:
        """All by seconds since the first look. `heard`: where the listener stood when."""
        looks = sorted(self.looks)
        start = looks[0][0] if looks else 0.0
        return {
            "looks": [[round(at - start, 2), *rest] for at, *rest in looks],
            "heard": [[round(at - start, 2), upper] for at, upper in self.heard],
            "marks": [[round(one.at_s - start, 2), one.kind, one.words] for one in self.marks],
        }

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self.looks.append([time.time(), *self.look()])
            except PersistError:  # a store is busy: the next look sees more
                continue
            if len(self.looks) > LOOKS_MAX:
                del self.looks[1::2]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def looker(location: Location, shard: str) -> Callable[[], Sequence[int]]:
    """Looks at a shard as `Timeline` wants it. -1 stands for closed."""

    def look() -> Sequence[int]:
        found = store.look(location, shard)
        state = location.machine(shard).state()
        frontiers = [-1 if one.element is None else one.element for one in (state.since, state.upper)]
        return [*frontiers, found.batches, found.live_bytes, found.blob_bytes]

    return look


__all__ = ["COMMIT", "EVENT", "Mark", "Timeline", "looker"]
