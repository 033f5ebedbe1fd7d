"""The interface of a consensus store: a log of small values per key, whose head moves only by compare-and-set.

Errors are named by what the caller may conclude:

    ConsensusError
      ConsensusUnavailable     definitely did not happen; retrying is safe
        ConsensusNotWritable   the disk is full or read-only: reads work
      ConsensusIndeterminate   may have happened; read the head before deciding anything
      ConsensusDamaged         the stored bytes are damaged; do not retry
      ConsensusMisconfigured   a setting is wrong; retrying cannot help
      ConsensusUsage           a bug of the caller (bad key, seqno, limit or size); nothing was sent

A lost race is not an error: `compare_and_set` returns False.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from consensus.advisory_locks import Turn

KEY_LENGTH_MAX = 256  # longest key in characters (all ASCII, so also bytes)
SCAN_LIMIT_MAX = 10_000  # most entries or keys that one call may ask for
SEQNO_MAX = 2**63 - 1  # largest seqno: every store keeps it as a signed 64-bit integer
HIDDEN = "\x7f"  # the first character of a hidden key: calls accept it, listings and notifications omit it
ENDED = b"PSSTE"  # a log whose head begins with these bytes has ended for now; `keys` can omit such keys
Wanted = Callable[[str], bool]  # whether a subscriber wants notifications of a key now

_KEY = re.compile(r"\x7f?[A-Za-z0-9._/-]+\Z")  # "\x7f" sorts after all the others, and no prefix matches it
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*\Z")


class ConsensusError(Exception):
    """Base of every error that a consensus store raises."""


class ConsensusUnavailable(ConsensusError):
    """The operation definitely did not happen. Retrying is safe."""


class ConsensusNotWritable(ConsensusUnavailable):
    """The disk is full or read-only, and nothing was written. Reads work.

    `is_read_only`: the disk is read-only, so it has to be repaired or mounted again before a retry can succeed.
    """

    def __init__(self, message: str, *, is_read_only: bool = False) -> None:
        super().__init__(message)
        self.is_read_only = is_read_only


class ConsensusIndeterminate(ConsensusError):
    """The operation may have happened or may still happen. Read the head again before concluding."""


class ConsensusDamaged(ConsensusError):
    """The stored bytes are damaged. Nothing was written. Retrying cannot help; restore a backup."""


class ConsensusMisconfigured(ConsensusError):
    """A setting or URL is wrong. The message names it. Retrying cannot help."""


class ConsensusUsage(ConsensusError):
    """The caller passed an invalid argument. Nothing was sent."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a key's log. The first has seqno 1, or that of its `begin`; the seqnos are consecutive."""

    seqno: int
    data: bytes


def check_key(key: str) -> str:
    """Return `key` unchanged, or raise ConsensusUsage if it is not a valid key."""
    if not _KEY.match(key) or len(key) > KEY_LENGTH_MAX:
        raise ConsensusUsage(f"consensus key {key[:60]!r} must be 1 to {KEY_LENGTH_MAX} of A-Z a-z 0-9 . _ / -")
    return key


def check_seqno(seqno: int, least: int = 1) -> None:
    """Raise ConsensusUsage unless `least <= seqno <= SEQNO_MAX`."""
    if not least <= seqno <= SEQNO_MAX:
        raise ConsensusUsage(f"seqno {seqno} must be between {least} and 2**63 - 1")


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= SCAN_LIMIT_MAX:
        raise ConsensusUsage(f"limit {limit} must be between 1 and {SCAN_LIMIT_MAX}")


def check_append(key: str, seqno: int, data: bytes, bytes_max: int) -> None:
    """Raise ConsensusUsage unless `data` can be an entry of `key` at `seqno`."""
    check_key(key)
    check_seqno(seqno)
    if len(data) > bytes_max:
        raise ConsensusUsage(
            f"the value of {len(data)} bytes for {key} exceeds the limit of this store ({bytes_max}); "
            "move more of it to the blob store"
        )


def check_scan(key: str, from_seqno: int, limit: int) -> None:
    """Raise ConsensusUsage unless these are valid arguments of `scan`."""
    check_key(key)
    check_seqno(from_seqno, 0)
    _check_limit(limit)


def check_listing(prefix: str, after: str, limit: int) -> None:
    """Raise ConsensusUsage unless these are valid arguments of `keys`. An empty prefix is that of every key."""
    for text in (prefix, after):
        if not _PREFIX.match(text) or len(text) > KEY_LENGTH_MAX:
            raise ConsensusUsage(f"prefix {text[:60]!r} must be at most {KEY_LENGTH_MAX} of A-Z a-z 0-9 . _ / -")
    _check_limit(limit)


class Consensus(ABC):
    """A store of logs. Linearizable per key, durable on return, thread-safe.

    Open one per process and reopen it after a fork (stores that have connections raise ConsensusUsage there). Live
    entries of a key are always contiguous and the head is never deleted. Every method may raise
    ConsensusUnavailable (did not happen), and those that write also ConsensusIndeterminate (may have happened).
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Canonical location, without secrets."""

    @property
    @abstractmethod
    def value_bytes_max(self) -> int:
        """Longest value in bytes that `compare_and_set` accepts."""

    @abstractmethod
    def head(self, key: str) -> Entry | None:
        """The newest entry, or None if the key has none. Never stale."""

    @abstractmethod
    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        """Append `data` at `seqno` if the head is `seqno - 1` (or there is none and `seqno` is 1).

        With `after` the data of the head must also begin with it and be longer. So a log that has lost entries and then
        grown differently rejects a writer that has read the lost ones.
        True: appended and durable. False: the head is another one. ConsensusUsage if `data` is longer than
        `value_bytes_max`, before anything is sent. ConsensusUnavailable: not appended. ConsensusIndeterminate: perhaps
        appended.
        """

    @abstractmethod
    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        """Make `data` the first entry of a key that has no log, at any `seqno`: to restore a log.

        True: it is the head, durably. False: the key has a log, which is unchanged. Raises as `compare_and_set`.
        """

    @abstractmethod
    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        """At most `limit` live entries with `seqno >= from_seqno`, ascending. Never stale, never with a gap."""

    @abstractmethod
    def truncate(self, key: str, seqno: int) -> int:
        """Delete the entries before `seqno` and return how many. The head always stays.

        ConsensusUsage if `seqno` is beyond the head (an unknown key has head 0), before anything is
        deleted. Retrying is safe. A store may delete in bounded batches, oldest first.
        """

    @abstractmethod
    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        """At most `limit` keys that start with `prefix` and sort after `after` (by bytes), ascending; no hidden one.

        Fewer only if there are no more. Without `with_ended`, keys whose head begins with `ENDED` are omitted.
        """

    def scrub(self) -> str:
        """Remove the bytes of deleted entries from the store's files, as far as that is safe at any time.

        Returns which bytes may remain and the command that removes them; "" if none remain. Retrying is safe.
        """
        return ""

    def turn(self, key: str, wait_s: float) -> AbstractContextManager[Turn]:
        """Hold an advisory lock on `key`, any name, during a `with`. Gives up after waiting for `wait_s` seconds.

        It only avoids lost races between processes: it raises nothing, and correctness must not depend on it.
        """
        return nullcontext(Turn.AT_ONCE)

    @abstractmethod
    def check(self) -> None:
        """Probe the store at start-up and create its table if it needs one.

        ConsensusMisconfigured names the setting that is wrong; ConsensusUnavailable if the store does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads. Do not use the store afterwards. Closing twice is allowed."""

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        """Call `callback(key)` when a key may have moved, except hidden keys.

        Returns a function that unsubscribes, or None if the store has no push channel. Notifications are only hints:
        they come from a background thread and may be late, repeated, spurious or lost. The callback must be quick; its
        exceptions are logged and dropped. A key for which `wanted(key)` is false may be skipped before any thread is
        woken: `wanted` is called from any thread, must be even quicker, and must not raise. A subscriber with `wanted`
        may be notified only of followed keys.
        """
        return None

    def follow(self, key: str) -> Callable[[], None]:
        """Notify subscribers that have `wanted` of this key until the returned function is called.

        Never blocks and never raises. The first notifications of a key may take a moment longer.
        """
        return lambda: None  # this store notifies subscribers of all keys
