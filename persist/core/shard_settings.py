"""Settings of a shard, which its State keeps: how much history is kept, and how finely wall clocks are told."""

from __future__ import annotations

import re

from persist.core.errors import InvalidUsage, shown
from persist.core.record import Record
from persist.core.retention_policy import Ladder, RowPolicy

MARK_EVERY_MS = 1_000
MARK_EVERY_MS_MAX = 24 * 3600 * 1000
HISTORY_MS_MAX = 2**48 - 1


class ShardSettings(Record, frozen=True):
    """`history_ms`: for so long every time stays readable, by the wall clock. None: for ever; 0: as readers need it.

    `mark_every_ms`: how finely a wall clock names a time. `rows`: which rows it keeps (None: all of them). `version`
    counts the changes, also those by which columns lose their names, which a policy may go by. 0: the shard has no
    settings, as those that are older than settings. Then since goes by the readers alone, and by what `forget` says.
    """

    history_ms: int | None = None
    mark_every_ms: int = MARK_EVERY_MS
    version: int = 0
    rows: RowPolicy | None = None

    @property
    def keeps_history(self) -> bool:
        """Whether the shard itself holds since back, whoever reads it."""
        return self.version > 0 and self.history_ms != 0

    def check(self) -> None:
        """Raises InvalidUsage where a number makes no sense."""
        if self.history_ms is not None and not 0 <= self.history_ms <= HISTORY_MS_MAX:
            raise InvalidUsage(f"history is {self.history_ms} ms; it must be in [0, {HISTORY_MS_MAX}], or for ever")
        if not 0 < self.mark_every_ms <= MARK_EVERY_MS_MAX:
            raise InvalidUsage(f"mark_every_ms is {self.mark_every_ms}; it must be in [1, {MARK_EVERY_MS_MAX}]")
        if self.rows is not None:
            self.rows.check()
            self._check_ladder(self.rows.tags)

    def _check_ladder(self, ladder: Ladder) -> None:
        """A tag shows what was there by an instant of the shard's own grid: that of its hour or day must be one."""
        for is_set, what, period_ms in (
            (ladder.hourly, "hourly", _UNITS_MS["h"]),
            (ladder.daily or ladder.monthly, "daily or monthly", _UNITS_MS["d"]),
        ):
            if is_set and period_ms % self.mark_every_ms:
                raise InvalidUsage(
                    f"mark_every is {history_text(self.mark_every_ms)}, by which no instant is known at which each "
                    f"{what} tag begins; make it a part of {history_text(period_ms)}, or leave these tags out"
                )


NO_SETTINGS = ShardSettings()

NONE, FOREVER = "none", "forever"
DEFAULT_HISTORY = "7d"  # of new shards
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_AGE = re.compile(r"([0-9]{1,15})(ms|s|m|h|d|w)")


def history_ms(given: object, what: str = "history", *, takes_none: bool = True) -> int | None:
    """The `history_ms` that a text means, such as `7d`, `none` or `forever`. Raises InvalidUsage naming `what`.

    Without `takes_none` an age of nothing is refused too.
    """
    found: int | None = -1
    if given in (NONE, FOREVER):
        found = 0 if given == NONE else None
    elif isinstance(given, str) and (age := _AGE.fullmatch(given)):
        found = int(age[1]) * _UNITS_MS[age[2]]
    if found is not None and not (0 if takes_none else 1) <= found <= HISTORY_MS_MAX:
        others = f"{NONE!r} or {FOREVER!r}" if takes_none else f"or {FOREVER!r}"
        raise InvalidUsage(f"{what} is {shown(given)}; it must be an age such as '7d' (ms, s, m, h, d or w), {others}")
    return found


def history_text(kept_ms: int | None) -> str:
    """As `history_ms` reads it, in the largest unit that fits."""
    if not kept_ms:
        return FOREVER if kept_ms is None else NONE
    unit = max((unit for unit, ms in _UNITS_MS.items() if kept_ms % ms == 0), key=_UNITS_MS.__getitem__)
    return f"{kept_ms // _UNITS_MS[unit]}{unit}"


class HistoryDefaults:
    """How much history new shards keep: `7d`, or with other ages for names that begin so: `7d,eu/=30d,tmp/=none`.

    Raises InvalidUsage where the text cannot be read.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._by_prefix: dict[str, int | None] = {}
        for item in text.split(","):
            prefix, _, age = item.strip().rpartition("=")
            self._by_prefix[prefix] = history_ms(age)
        if "" not in self._by_prefix:
            raise InvalidUsage(f"history is {text!r:.100}; it must begin with what holds for all names, such as '7d'")

    def of(self, name: str) -> ShardSettings:
        """The settings of a new shard of this name: those of the longest prefix."""
        prefix = max((prefix for prefix in self._by_prefix if name.startswith(prefix)), key=len)
        return ShardSettings(self._by_prefix[prefix], version=1)
