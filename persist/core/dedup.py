"""Outcomes of commands that came with a token of their own: kept so long that whoever repeats one is answered alike.

The State holds the recent ones; older ones lie in files (`persist.core.spill`). A token that persist minted carries
the time of its birth. Once an outcome is forgotten, every minted token that is as old as the forgotten one is refused:
it may have landed. So such a token never lands twice. A free-form key is a new one when its outcome is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from persist.core.frontier import Antichain
from persist.core.ids import Token, WriterId
from persist.core.record import Record

_VERSION_AT = 12  # the hex digit of a UUID that tells its version
_MINTED = "7"
DIGEST_BYTES = 16
RETIRED = b"retired"  # stands for the digest where the id is that of a writer which has written and was retired
ENDED = b"ended"  # stands for the digest where the token landed in an earlier life of the name
ENDED_MAX = 1_000  # of these that the next life takes along
FUTURE_MS_MAX = 24 * 3600 * 1000  # a token that was born so long after now is refused: its maker's clock is wrong
RETIRED_PER_COMMIT_MAX = 1_000  # writers whose leases lapsed; the others follow with later commits


class TokenOutcome(Record, frozen=True):
    """What became of the command of one token: it took `[lower, upper)`; `at_ms` is when, by the State's clock.

    `digest` is of what was asked for, so that a token is not taken for another command. Empty: not known.
    """

    lower: Antichain
    upper: Antichain
    digest: bytes
    at_ms: int


def key_of(identity: Token | WriterId) -> str:
    """The 32 hex digits under which the outcome of a token, or of a writer's retirement, is kept."""
    return identity[1:]


def born_ms(key: str) -> int | None:
    """When the id was minted, in milliseconds since 1970 by its maker's clock; None: it is free-form."""
    return int(key[:_VERSION_AT], 16) if key[_VERSION_AT] == _MINTED else None


def births(keys: Iterable[str]) -> list[int]:
    """When those of the ids were minted that are not free-form."""
    return [born for key in keys if (born := born_ms(key)) is not None]
