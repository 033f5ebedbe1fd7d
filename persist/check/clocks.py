"""Clocks: of who commits, of the blob store, and of this machine. Nothing is probed: what lies there already tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from persist.check.diagnosis import Diagnosis, diagnosis
from persist.check.limits import OFFSET_MS_MAX
from persist.check.saying import age
from persist.check.seen import Seen
from persist.core.keys import belongs_to, born_ms, shard_of

REMEDY = "set the clocks by NTP on all machines that write, and on that of the blob store"


@dataclass(frozen=True, slots=True)
class ClocksSeen:
    """What one shard tells of clocks: by how much its last commit lies in the future, by how much a blob was made after
    the store says that it was written, and by how much the store's time of a blob lies in the future. At least 0.
    """

    shard: str
    commit_ms: int
    maker_ms: int
    store_ms: int


def clocks_of(seen: Seen, now_ms: int) -> ClocksSeen:
    """Of a shard that was read before `now_ms`: what is later than that lies in the future."""
    commit_ms = 0 if seen.state is None else seen.state.walltime_ms - now_ms
    maker_ms = store_ms = 0
    for key, stat in seen.listed.items():
        store_ms = max(store_ms, stat.modified_ms - now_ms)
        if belongs_to(key, shard_of(key)):
            maker_ms = max(maker_ms, born_ms(key) - stat.modified_ms)
    return ClocksSeen(seen.name, max(0, commit_ms), maker_ms, store_ms)


def clock_off(found: Iterable[ClocksSeen]) -> Iterator[Diagnosis]:
    """One finding for each pair of clocks that do not agree, by the shard that shows it most.

    A maker's clock that is behind the store's cannot be told from a copy that was made later.
    """
    known = [one for one in found if max(one.commit_ms, one.maker_ms, one.store_ms) > OFFSET_MS_MAX]
    for ahead, name in (
        ("maker_ms", "a writer's clock is {} ahead of the blob store's"),
        ("store_ms", "the blob store's clock is {} ahead of this machine's"),
        ("commit_ms", "a commit is {} in the future, by this machine's clock"),
    ):
        worst = max(known, key=lambda one: (getattr(one, ahead), one.shard), default=None)
        if worst is None or getattr(worst, ahead) <= OFFSET_MS_MAX:
            continue
        yield diagnosis(
            "clock-off",
            worst.shard,
            name.format(age(getattr(worst, ahead))),
            cause="clocks of machines differ; while they do no instants are settled, and nothing goes by age",
            remedy=f"{REMEDY}; what a clock far ahead has settled is taken back by --repair-clock",
            command=f"persist history {worst.shard}",
        )
