"""Going on step by step after a listen, which is begun anew after whatever goes wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from persist.client.arguments import checked_wait
from persist.client.listen import Listen
from persist.client.write import WriteHandle
from persist.core.errors import Expired
from persist.patterns.feed_position import FeedPosition


class Stepping(ABC):
    """Follows a listen and writes what follows from it. `_listen` is None where it has to begin anew."""

    _writer: WriteHandle
    _fed: FeedPosition
    _listen: Listen | None = None

    def step(self, wait_s: float = 0.0) -> bool:
        """Write what is new; wait at most `wait_s` seconds for it. Whether anything was.

        Repeating it is safe, after any error. Raises: InvalidUsage (`wait_s` is no number), what the class says, and
        what every call may.
        """
        checked_wait("wait_s", wait_s)
        try:
            return self._step(wait_s)
        except Expired:  # it was not asked for so long that its lease has lapsed
            self._end()
            return self._step(wait_s)
        except BaseException:  # it begins anew from what the shards tell
            self._end()
            raise

    @property
    def upper(self) -> int:
        """Up to which time of its feed the shard has all, as far as this object knows. No I/O."""
        return self._fed.before

    def rebind(self) -> None:
        """Go on where others have written to the shard, which `step` refuses (Conflict).

        What the feed has at the times that they took is written at the first time that is free. Their rows stay. Of a
        shard that was fed by an older version, what that has left out at times that were taken stays left out.
        Raises: Conflict (the shard is closed), and what every call may.
        """
        self._end()
        self._fed.accept()

    def close(self) -> None:
        """Give back what it holds. Raises what every call may."""
        self._end()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def _step(self, wait_s: float) -> bool:
        """A step; `_listen` is there afterwards."""

    def _end(self) -> None:
        if self._listen is not None:
            self._listen.close()
            self._listen = None
