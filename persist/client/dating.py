"""Dating: from which wall clock on each of many times of a shard is shown, for a whole column of times at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist.client.retry import send
from persist.client.transport import Transport
from persist.core import commands as c
from persist.core.antichain import TIME_MAX
from persist.core.errors import InvalidUsage
from persist.core.marks import MARKS_PAGE_MAX

TIMESTAMP = pa.timestamp("us", "UTC")
STRETCHES_MAX = 2_000_000  # 32 MB; with a mark each second, the times of 23 days
PAGE = MARKS_PAGE_MAX  # stretches that one request asks for
MICROSECONDS = 1_000  # in a millisecond
_CLOSED = TIME_MAX + 1  # beyond every time


@dataclass(frozen=True)
class Dates:
    """Stretches of times that have one wall clock each, ascending.

    The times from `uppers[n - 1]` up to before `uppers[n]` are shown from `instants_ms[n]` on. What lies before the
    first upper or beyond the last one is not known.
    """

    uppers: npt.NDArray[np.int64]
    instants_ms: npt.NDArray[np.int64]

    def of(self, times: pa.ChunkedArray) -> pa.Array:
        """The wall clock of each time, which must not be null; null where it is not known."""
        places = np.searchsorted(self.uppers, times.to_numpy(), side="right")
        known = (places > 0) & (places < len(self.uppers))
        found = np.zeros(len(places), np.int64)
        found[known] = self.instants_ms[places[known]]
        return pa.array(found * MICROSECONDS, mask=~known).cast(TIMESTAMP)


def dates_of(transport: Transport, name: str, first: int, last: int, retry_s: float) -> Dates:
    """The wall clocks of the times from `first` to `last`: a request for each 4,096 stretches, at least one.

    They are the same whenever and wherever this is asked, as long as `first` is kept. Raises NotReadable (it was
    forgotten), InvalidUsage (there are too many of them), and what `send` raises.
    """
    pages: list[npt.NDArray[np.int64]] = []  # pairs of an upper and an instant, newest first
    following: int | None = last
    while following is not None:
        page = send(transport, name, c.TimesShown(first, following, PAGE), retry_s)
        assert isinstance(page, c.MarksShown)
        pairs = [(_CLOSED if one.upper.element is None else one.upper.element, one.at_ms) for one in page.marks]
        pages.append(np.array(pairs, np.int64).reshape(-1, 2))
        following = page.following
        if sum(map(len, pages)) > STRETCHES_MAX:
            raise InvalidUsage(
                f"the times from {first} to {last} of shard {name!r} have more than {STRETCHES_MAX} wall clocks; ask "
                "for fewer times at once"
            )
    told = np.unique(np.concatenate(pages), axis=0)  # a page begins with the mark at which the one before it ended
    return Dates(told[:, 0], told[:, 1])
