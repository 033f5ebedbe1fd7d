"""What a consensus store is: per key, a log of small values whose head moves by compare-and-set only."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from consensus.errors import ConsensusUsage
from consensus.turns import Turn

KEY_LENGTH_MAX = 256
"""Longest key in characters (all ASCII, so also bytes)."""

SCAN_LIMIT_MAX = 10_000
"""Most entries or keys that one call may ask for."""

SEQNO_MAX = 2**63 - 1
"""Largest seqno: every store keeps it as a signed 64-bit integer."""

HIDDEN = "\x7f"
"""The first character of a hidden key: every call takes such a key; no list has it, and no subscriber hears of it."""

ENDED = b"PSSTE"
"""A log whose head begins with these bytes has ended for now; `keys` leaves such a key out where it is asked to."""

Wanted = Callable[[str], bool]
"""Whether a subscriber cares for a key now."""

_KEY = re.compile(r"\x7f?[A-Za-z0-9._/-]+\Z")  # "\x7f" sorts after all the others, and no prefix leads to it
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*\Z")


def _nothing() -> None:
    """The end of following, where a store tells its subscribers of all keys anyway."""


def check_process(opened_by: int, url: str) -> None:
    """Raises ConsensusUsage in a fork of the process `opened_by`, whose connections it must not use."""
    if os.getpid() != opened_by:
        raise ConsensusUsage(f"{url} was opened by process {opened_by}, of which this is a fork; open it anew here")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a key's log. The first has seqno 1, or that of its `begin`; each later one exactly one more."""

    seqno: int
    data: bytes


def check_key(key: str) -> str:
    """Return `key` unchanged, or raise ConsensusUsage if no store may be asked for it."""
    if not _KEY.match(key) or len(key) > KEY_LENGTH_MAX:
        raise ConsensusUsage(f"consensus key {key[:60]!r} must be 1 to {KEY_LENGTH_MAX} of A-Z a-z 0-9 . _ / -")
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` (of keys; empty is every key) unchanged, or raise ConsensusUsage."""
    if not _PREFIX.match(prefix) or len(prefix) > KEY_LENGTH_MAX:
        raise ConsensusUsage(f"prefix {prefix[:60]!r} must be at most {KEY_LENGTH_MAX} of A-Z a-z 0-9 . _ / -")
    return prefix


def check_seqno(seqno: int, least: int = 1) -> int:
    """Return `seqno` unchanged, or raise ConsensusUsage unless `least <= seqno <= SEQNO_MAX`."""
    if not least <= seqno <= SEQNO_MAX:
        raise ConsensusUsage(f"seqno {seqno} must be between {least} and 2**63 - 1")
    return seqno


def check_limit(limit: int) -> int:
    """Return `limit` unchanged, or raise ConsensusUsage unless `1 <= limit <= SCAN_LIMIT_MAX`."""
    if not 1 <= limit <= SCAN_LIMIT_MAX:
        raise ConsensusUsage(f"limit {limit} must be between 1 and {SCAN_LIMIT_MAX}")
    return limit


def check_value(key: str, data: bytes, bytes_max: int) -> bytes:
    """Return `data` unchanged, or raise ConsensusUsage if the store could not take it."""
    if len(data) > bytes_max:
        raise ConsensusUsage(
            f"the value of {len(data)} bytes for {key} is longer than this store takes ({bytes_max}); "
            "move more of it to the blob store"
        )
    return data


class Consensus(ABC):
    """A store of logs. Linearizable per key, durable on return, thread-safe.

    Open one per process; after a fork open it anew (stores that have connections raise ConsensusUsage there). Live
    entries of a key are always contiguous and the head never goes away. Every method may raise
    ConsensusUnavailable (did not happen), and those that write also ConsensusIndeterminate (may have happened).
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Canonical location, without secrets."""

    @property
    @abstractmethod
    def value_bytes_max(self) -> int:
        """Longest value in bytes that `compare_and_set` takes."""

    @abstractmethod
    def head(self, key: str) -> Entry | None:
        """The newest entry, or None if the key has none. Never stale."""

    @abstractmethod
    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        """Append `data` at `seqno` if the head is `seqno - 1` (or there is none and `seqno` is 1).

        With `after` also only if the data of the head begin with it, and are longer: so a log that has lost entries,
        and grown again otherwise, takes nothing from who has read the lost ones.
        True: appended and durable. False: lost, the head is another one. ConsensusUsage if `data` is
        longer than `value_bytes_max`, before anything is sent. ConsensusUnavailable: not appended.
        ConsensusIndeterminate: perhaps appended.
        """

    @abstractmethod
    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        """Make `data` the first entry of a key that never had one, at any `seqno`: for a log that is brought back.

        True: it is the head, durably. False: the key has a log, which stays as it is. Raises what `compare_and_set`
        raises.
        """

    @abstractmethod
    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        """At most `limit` live entries with `seqno >= from_seqno`, ascending. Never stale, never with a gap."""

    @abstractmethod
    def truncate(self, key: str, seqno: int) -> int:
        """Delete the entries before `seqno` and return how many. The head always stays.

        ConsensusUsage if `seqno` is beyond the head (an unknown key has head 0), before anything is
        deleted. Repeating it is safe. A store may delete in bounded batches, oldest first.
        """

    @abstractmethod
    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        """At most `limit` keys that start with `prefix` and sort after `after` (by bytes), ascending; no hidden one.

        Fewer only if there are no more. Without `with_ended`, a key is left out whose head begins with `ENDED`.
        """

    def scrub(self) -> str:
        """Remove the bytes of deleted entries from where the store keeps its data, as far as it is safe at any time.

        Returns what may be left all the same, and the command that removes it; "" if nothing is. Repeating it is safe.
        """
        return ""

    def turn(self, key: str, wait_s: float) -> AbstractContextManager[Turn]:
        """Have the turn on `key`, a name of any kind, while a `with` lasts, unless others have it for `wait_s` seconds.

        An accelerator only, for processes that would race: it raises nothing, and nobody may rely on it.
        """
        return nullcontext(Turn.AT_ONCE)

    @abstractmethod
    def check(self) -> None:
        """Probe the store at start-up and make what it needs (its table).

        ConsensusMisconfigured names the setting that is wrong; ConsensusUnavailable if nobody answers.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads. Using the store afterwards is a bug. Closing twice is fine."""

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        """Have `callback(key)` called when a key may have moved; returns what unsubscribes, or None if the
        store has no push channel. Of hidden keys nobody hears.

        An accelerator only: calls come from a background thread, late, twice, for nothing, or never. The
        callback must be quick; what it raises is logged and dropped. A key for which `wanted(key)` is false may be
        left out, before any thread is woken for it: asked from any thread, it must be quicker still, and raise nothing.
        A subscriber with `wanted` may hear of no other keys than those that are followed.
        """
        return None

    def follow(self, key: str) -> Callable[[], None]:
        """Have subscribers that tell what they want hear of this key, until the function that is returned is called.

        Never blocks, and raises nothing. Who begins to follow a key may have to wait for news a moment longer.
        """
        return _nothing
