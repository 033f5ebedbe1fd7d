"""Settings of a shard, which its State keeps: how much history is kept, and how finely wall clocks are told."""

from __future__ import annotations

from persist.core.errors import InvalidUsage
from persist.core.record import Record

MARK_EVERY_MS = 1_000
MARK_EVERY_MS_MAX = 24 * 3600 * 1000
HISTORY_MS_MAX = 2**48 - 1


class ShardSettings(Record, frozen=True):
    """`history_ms`: for so long every time stays readable, by the wall clock. None: for ever; 0: as readers need it.

    `mark_every_ms`: how finely a wall clock names a time. `version` counts the changes. 0: the shard has no settings,
    as those that are older than settings. Then since goes by the readers alone, and by what `forget` says.
    """

    history_ms: int | None = None
    mark_every_ms: int = MARK_EVERY_MS
    version: int = 0

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


NO_SETTINGS = ShardSettings()
