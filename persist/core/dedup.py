"""Outcomes of commands with a caller's token: kept so that a retry receives the same answer.

The State holds the recent ones; older ones are in files (`persist.core.spill`). A token that persist minted contains
the time at which it was minted. Once an outcome is forgotten, every minted token that is as old is refused, since it
may have landed: such a token never lands twice. A free-form token counts as new once its outcome is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from persist.core.frontier import Antichain
from persist.core.ids import Token, WriterId
from persist.core.record import Record

_VERSION_AT = 12  # index of the hex digit of a UUID that is its version
_MINTED = "7"
DIGEST_BYTES = 16
RETIRED = b"retired"  # in place of a digest: the id is that of a retired writer
ENDED = b"ended"  # in place of a digest: the token landed in an earlier life of the name
ENDED_MAX = 1_000  # of these that the next life inherits
FUTURE_MS_MAX = 24 * 3600 * 1000  # a token minted later than this after now is refused: a clock is wrong
RETIRED_PER_COMMIT_MAX = 1_000  # lapsed writers; the rest follows with later commits


class TokenOutcome(Record, frozen=True):
    """The outcome of the command of one token: its interval `[lower, upper)`; `at_ms`: when, by the State's clock.

    `digest` is of the request, so that a token is not reused for another command. Empty: unknown.
    """

    lower: Antichain
    upper: Antichain
    digest: bytes
    at_ms: int


def key_of(identity: Token | WriterId) -> str:
    """The 32 hex digits under which the outcome of a token, or the retirement of a writer, is stored."""
    return identity[1:]


def born_ms(key: str) -> int | None:
    """When the id was minted, in milliseconds since 1970 by its maker's clock; None: it is free-form."""
    return int(key[:_VERSION_AT], 16) if key[_VERSION_AT] == _MINTED else None


def births(keys: Iterable[str]) -> list[int]:
    """When the minted ids among these were minted."""
    return [born for key in keys if (born := born_ms(key)) is not None]
