"""On which of PostgreSQL's channels a key is told, and to which of them a process listens.

PostgreSQL wakes a listener for each message on its channels. With one channel for all keys every process hears of every
commit of all others. So a key has one of `CHANNELS` channels, and a process listens to those of the keys that somebody
follows there. Older builds know the one channel `OLD_CHANNEL` only.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from zlib import crc32

CHANNELS = 256
"""Who follows ten keys hears of one in 26 of all others. PostgreSQL looks through a list of those it listens to."""

OLD_CHANNEL = "consensus_moved"
"""On which older builds tell every key, and the only one that they listen to."""

LINGER_S = 60.0
"""How long a process goes on listening to a channel that nobody follows any more: waits come and go."""

OLD_LOOK_S = 10.0
"""How often who announces looks whether older builds are there."""

_MARK = " (channels)"
_NAME_MAX = 63  # bytes of an application_name that PostgreSQL keeps
_DEFAULT_NAME = "persist"

OLDER = (
    "SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name = ANY(%s))"
)


def channel_of(key: str) -> str:
    """The channel on which a key is told. Every build must find the same."""
    return f"{OLD_CHANNEL}_{crc32(key.encode()) % CHANNELS:03d}"


ALL_CHANNELS = frozenset(f"{OLD_CHANNEL}_{number:03d}" for number in range(CHANNELS))


def application_name(given: str | None) -> str:
    """The name under which this build connects: with a mark, by which it is told from older ones."""
    return (given or _DEFAULT_NAME)[: _NAME_MAX - len(_MARK)] + _MARK


def older_names(given: str | None) -> list[str]:
    """The names under which older builds connect: by default, and with the same options."""
    return sorted({_DEFAULT_NAME, (given or _DEFAULT_NAME)[:_NAME_MAX]})


class Followed:
    """The keys that somebody in this process follows, and so the channels to listen to. Thread-safe.

    `changed` is called, without the lock, when a channel is wanted that was not.
    """

    def __init__(self) -> None:
        self.changed: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._keys: Counter[str] = Counter()
        self._channels: Counter[str] = Counter()
        self._all = 0
        self._left_s: dict[str, float] = {}  # channels that nobody follows any more, and when that was noticed

    def follow(self, key: str) -> Callable[[], None]:
        """Follow one key until the function that is returned is called, which may be called twice."""
        channel = channel_of(key)
        with self._lock:
            self._keys[key] += 1
            self._channels[channel] += 1
            is_new = self._channels[channel] == 1
        if is_new:
            self.changed()
        return _Once(lambda: self._leave(key, channel))

    def follow_all(self) -> Callable[[], None]:
        """Follow every key, as `follow` does one."""
        with self._lock:
            self._all += 1
        self.changed()
        return _Once(self._leave_all)

    def wanted(self, listening: Iterable[str], now_s: float) -> frozenset[str]:
        """The channels to listen to, of one who listens to these: those that are followed, or were a moment ago."""
        with self._lock:
            used = ALL_CHANNELS if self._all else frozenset(self._channels)
            unused = [channel for channel in listening if channel not in used and channel in ALL_CHANNELS]
            self._left_s = {channel: self._left_s.get(channel, now_s) for channel in unused}
            return used | {channel for channel, left_s in self._left_s.items() if now_s - left_s < LINGER_S}

    def keys_of(self, channels: Iterable[str]) -> list[str]:
        """The keys that are followed, of those that are told on these channels."""
        among = frozenset(channels)
        with self._lock:
            return [key for key in self._keys if channel_of(key) in among]

    def _leave(self, key: str, channel: str) -> None:
        with self._lock:
            for counter, name in ((self._keys, key), (self._channels, channel)):
                counter[name] -= 1
                if not counter[name]:
                    del counter[name]

    def _leave_all(self) -> None:
        with self._lock:
            self._all -= 1


class _Once:
    """Calls a function the first time only."""

    def __init__(self, ending: Callable[[], None]) -> None:
        self._ending: Callable[[], None] | None = ending
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            ending, self._ending = self._ending, None
        if ending is not None:
            ending()
