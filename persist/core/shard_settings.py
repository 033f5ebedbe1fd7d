"""Settings of a shard, stored in its State: retention of history, the grid of wall clocks, and the row policy.

A row policy uses cuts that maintenance takes as time passes: the upper of the shard at an instant of a grid. The shard
is truncated by a cut once the policy requires it. Until then the time before the cut stays readable, as that of a tag.
"""

from __future__ import annotations

import re
from typing import Annotated

from persist.core.errors import InvalidUsage, shown
from persist.core.record import Meta, Record

CUTS_MAX = 1_000  # of a shard; beyond that every other one is removed
CUTS_OF_AN_AGE_MAX = 900  # so that a policy by age finds one that is old enough
CUTS_OF_AN_AGE = 100  # unless the policy sets cut_every
CUT_EVERY_MS_MIN = 1_000
CUT_EVERY_MS_MAX = 366 * 24 * 3600 * 1000
CUT_EVERY_MS = 3_600_000  # of a policy without an age
DAY_MS = 24 * 3600 * 1000
AGE_MS_MAX = CUTS_OF_AN_AGE * CUT_EVERY_MS_MAX  # a hundred years
NUMBER_MAX = 2**62
CONSUMERS_MAX = 100
RUNG_MAX = 200  # tags of one kind in a ladder
CURSOR_CHARS_MAX = 256
COLUMN_CHARS_MAX = 1_000
RETRACT, DROP = "retract", "drop"  # how a cut removes rows
UNITS = ("s", "ms", "us", "ns")  # of a column of whole numbers: since 1970, UTC
_BYTES = re.compile(r"([0-9]{1,18})(B|[KMGTP]iB|[kMGTP]B)?")
_BYTE_UNITS: dict[str, int] = {unit + "iB": 1024**power for power, unit in enumerate("KMGTP", 1)}
_BYTE_UNITS |= {unit + "B": 1000**power for power, unit in enumerate("kMGTP", 1)} | {"B": 1}


class Ladder(Record, frozen=True):
    """The numbers of hourly, daily and monthly tags."""

    hourly: int = 0
    daily: int = 0
    monthly: int = 0

    def check(self) -> None:
        """Raise InvalidUsage if a number is out of range."""
        for rung in ("hourly", "daily", "monthly"):
            count = getattr(self, rung)
            if not 0 <= count <= RUNG_MAX:
                raise InvalidUsage(f"{rung} is {count}; it must be in [0, {RUNG_MAX}]")


class Rung(Record, frozen=True):
    """A tag of a ladder: its name, and the instant whose contents it keeps."""

    tag: str
    at_ms: Annotated[int, Meta(ge=0, le=2**48 - 1)]


NO_LADDER = Ladder()


class RowPolicy(Record, frozen=True):
    """Rows older than `age_ms` are removed, and the oldest ones beyond `bytes_max` or `rows_max`; None: no such limit.

    `cut_every_ms` is the granularity: rows written before an instant of that grid are removed together. Rows that one
    of the critical readers `consumers` has not passed are kept, unless they are older than `consumers_max_age_ms`
    (None: always). `tags` is the ladder of tags that maintenance sets and removes. Rows whose `column` has a wall clock
    older than `column_age_ms` are removed too, whenever they were written; `column_unit` is the unit of whole numbers
    ("": the column has a timestamp type). `mode` says whether cuts remove rows by retractions or by a drop.
    """

    age_ms: int | None = None
    bytes_max: int | None = None
    rows_max: int | None = None
    cut_every_ms: int = CUT_EVERY_MS
    consumers: tuple[str, ...] = ()
    consumers_max_age_ms: int | None = None
    tags: Ladder = NO_LADDER
    column: str | None = None
    column_age_ms: int | None = None
    column_unit: str = ""
    mode: str = RETRACT

    @property
    def cuts(self) -> bool:
        """Whether rows are removed by the time of their writes, so that cuts are taken."""
        return self.age_ms is not None or self.bytes_max is not None or self.rows_max is not None

    @property
    def takes_rows(self) -> bool:
        """Whether it removes rows; otherwise it only sets tags."""
        return self.cuts or self.column is not None

    def check(self) -> None:
        """Raise InvalidUsage if a limit is out of range or does not fit another one."""
        self.tags.check()
        self._check_column()
        self._check_mode()
        if not self.takes_rows and self.tags == NO_LADDER:
            raise InvalidUsage(
                "a policy needs an age, bytes, rows, a column or tags; to keep all rows remove the policy"
            )
        if not self.takes_rows and self.consumers:
            raise InvalidUsage("consumers are for a policy with an age, bytes, rows or a column")
        for what, value in (("bytes", self.bytes_max), ("rows", self.rows_max)):
            if value is not None and not 0 < value <= NUMBER_MAX:
                raise InvalidUsage(f"{what} is {value}; it must be in [1, {NUMBER_MAX}]")
        for what, age_ms in (
            ("age", self.age_ms),
            ("consumers_max_age", self.consumers_max_age_ms),
            ("column_age", self.column_age_ms),
        ):
            if age_ms is not None and not 0 < age_ms <= AGE_MS_MAX:
                raise InvalidUsage(f"{what} is {age_ms} ms; it must be positive, at most {AGE_MS_MAX // DAY_MS} days")
        if not CUT_EVERY_MS_MIN <= self.cut_every_ms <= CUT_EVERY_MS_MAX:
            raise InvalidUsage(
                f"cut_every is {self.cut_every_ms} ms; it must be in [{CUT_EVERY_MS_MIN}, {CUT_EVERY_MS_MAX}]"
            )
        longest = max(self.age_ms or 0, self.consumers_max_age_ms or 0) if self.cuts else 0
        if longest > CUTS_OF_AN_AGE_MAX * self.cut_every_ms:
            raise InvalidUsage(
                f"cut_every is {self.cut_every_ms} ms; for an age (or consumers_max_age) of {longest} ms it must be "
                f"at least {-(-longest // CUTS_OF_AN_AGE_MAX)} ms"
            )
        if self.consumers_max_age_ms is not None and not self.consumers:
            raise InvalidUsage("consumers_max_age is given without consumers")
        if len(self.consumers) > CONSUMERS_MAX or len(set(self.consumers)) < len(self.consumers):
            raise InvalidUsage(f"a policy has at most {CONSUMERS_MAX} consumers, each of them once")
        for consumer in self.consumers:
            if not 1 <= len(consumer) <= CURSOR_CHARS_MAX:
                raise InvalidUsage(
                    f"a consumer is a cursor of 1 to {CURSOR_CHARS_MAX} characters, not {shown(consumer)}"
                )

    def _check_mode(self) -> None:
        if self.mode not in (RETRACT, DROP):
            raise InvalidUsage(f"mode is {shown(self.mode)}; it must be {RETRACT!r} or {DROP!r}")
        if self.mode == DROP and self.column is not None:
            raise InvalidUsage("a drop removes rows by the time of their writes, not by a column; use mode 'retract'")
        if self.mode == DROP and not self.cuts:
            raise InvalidUsage("mode is for a policy with an age, bytes or rows")

    def _check_column(self) -> None:
        if (self.column is None) != (self.column_age_ms is None):
            raise InvalidUsage("column and column_age belong together: the column, and the age at which rows expire")
        if self.column is None and self.column_unit:
            raise InvalidUsage("column_unit is given without column")
        if self.column is not None and not 1 <= len(self.column) <= COLUMN_CHARS_MAX:
            raise InvalidUsage(
                f"column is {shown(self.column)}; it must be a name of 1 to {COLUMN_CHARS_MAX} characters"
            )
        if self.column_unit and self.column_unit not in UNITS:
            raise InvalidUsage(f"column_unit is {shown(self.column_unit)}; it must be one of {', '.join(UNITS)}")


def cut_every_of(age_ms: int | None, consumers_max_age_ms: int | None = None) -> int:
    """The default `cut_every_ms` for these ages: so coarse that the cuts cover both."""
    fine_ms = CUT_EVERY_MS if age_ms is None else max(CUT_EVERY_MS_MIN, age_ms // CUTS_OF_AN_AGE)
    return min(CUT_EVERY_MS_MAX, max(fine_ms, -(-(consumers_max_age_ms or 0) // CUTS_OF_AN_AGE_MAX)))


def bytes_of(given: object) -> int:
    """The bytes of a number or a text such as `500GiB` or `20MB`. Raises InvalidUsage."""
    if type(given) is int:
        return given
    if isinstance(given, str) and (match := _BYTES.fullmatch(given)):
        return int(match[1]) * _BYTE_UNITS[match[2] or "B"]
    raise InvalidUsage(f"bytes is {shown(given)}; it must be a number, or a text such as '500GiB'")


class KeptCut(Record, frozen=True):
    """The upper of the shard at an instant. `rows` were written by then, rows removed by truncations included.

    None: unknown. Rows that were retracted otherwise do not count.
    """

    upper: int
    rows: int | None = None


class Looked(Record, frozen=True):
    """The result of the last look for expired rows by the policy's column, by the settings of `version`; 0: none yet.

    It read everything before the time `upper`, at `at_ms` by a checked clock, and removed `removed` rows. No remaining
    row expires before `next_ms` (None: never), except rows that wait for consumers: `held` is the time that all
    consumers had passed (None: no row waits).
    """

    version: int = 0
    upper: int = 0
    at_ms: int = 0
    removed: int = 0
    next_ms: int | None = None
    held: int | None = None


NOT_LOOKED = Looked()


class Retention(Record, frozen=True):
    """The progress of the policy: it is done with everything before the time `upper`, the cut of the instant `cut_ms`.

    That was at `at_ms`, by a checked clock, and removed `removed` rows (None: unknown). `overran` counts the
    truncations that passed a consumer. `appended`: the last rows came by `append`, whose writer owns the times.
    `looked` is the progress by the column.
    """

    cut_ms: int = 0
    upper: int = 0
    at_ms: int = 0
    removed: int | None = None
    overran: int = 0
    appended: bool = False
    looked: Looked = NOT_LOOKED


NO_RETENTION = Retention()


MARK_EVERY_MS = 1_000
MARK_EVERY_MS_MAX = 24 * 3600 * 1000
HISTORY_MS_MAX = 2**48 - 1


class ShardSettings(Record, frozen=True):
    """`history_ms`: the retention of history; None: unlimited; 0: as long as readers need it.

    `mark_every_ms`: the granularity of wall clocks. `rows`: the row policy (None: all rows are kept). `version` counts
    the changes, also renames of columns, since a policy may name one. 0: the shard has no settings. Then only readers
    and `forget` determine since.
    """

    history_ms: int | None = None
    mark_every_ms: int = MARK_EVERY_MS
    version: int = 0
    rows: RowPolicy | None = None

    @property
    def keeps_history(self) -> bool:
        """Whether the shard itself holds since back, independently of readers."""
        return self.version > 0 and self.history_ms != 0

    def check(self) -> None:
        """Raise InvalidUsage if a number is out of range."""
        if self.history_ms is not None and not 0 <= self.history_ms <= HISTORY_MS_MAX:
            raise InvalidUsage(f"history is {self.history_ms} ms; it must be in [0, {HISTORY_MS_MAX}], or for ever")
        if not 0 < self.mark_every_ms <= MARK_EVERY_MS_MAX:
            raise InvalidUsage(f"mark_every_ms is {self.mark_every_ms}; it must be in [1, {MARK_EVERY_MS_MAX}]")
        if self.rows is not None:
            self.rows.check()
            self._check_ladder(self.rows.tags)

    def _check_ladder(self, ladder: Ladder) -> None:
        """A tag keeps the contents at an instant of the shard's grid, so its hour or day must be one."""
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


def history_ms(
    given: object, what: str = "history", *, takes_none: bool = True, takes_zero: bool = False
) -> int | None:
    """The `history_ms` of a text such as `7d`, `none` or `forever`. Raises InvalidUsage naming `what`.

    An age of zero such as `0d`, which is more likely a mistake than `none`, is refused without `takes_zero`.
    """
    age_ms: int | None = -1
    if given in (NONE, FOREVER):
        age_ms = 0 if given == NONE else None
    elif isinstance(given, str) and (age := _AGE.fullmatch(given)):
        age_ms = int(age[1]) * _UNITS_MS[age[2]]
    least = 0 if takes_zero or (takes_none and given == NONE) else 1
    if age_ms is not None and not least <= age_ms <= HISTORY_MS_MAX:
        others = f"{NONE!r} or {FOREVER!r}" if takes_none else f"or {FOREVER!r}"
        raise InvalidUsage(f"{what} is {shown(given)}; it must be an age such as '7d' (ms, s, m, h, d or w), {others}")
    return age_ms


def history_text(kept_ms: int | None) -> str:
    """The text that `history_ms` reads, in the largest unit that fits."""
    if not kept_ms:
        return FOREVER if kept_ms is None else NONE
    unit = max((unit for unit, ms in _UNITS_MS.items() if kept_ms % ms == 0), key=_UNITS_MS.__getitem__)
    return f"{kept_ms // _UNITS_MS[unit]}{unit}"


class HistoryDefaults:
    """Default retention of new shards: `7d`, or with others by prefix of the name: `7d,eu/=30d,tmp/=none`.

    Raises InvalidUsage if the text is malformed.
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
