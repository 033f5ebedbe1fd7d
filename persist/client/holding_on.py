"""A hold for as long as somebody refers to it: a thread renews it, and it is given back when nobody does any more."""

from __future__ import annotations

import threading
import weakref

from persist.client.lease import LEASE_RENEWED_AFTER, ReadLease
from persist.commit.system import OwnProcess
from persist.core.errors import Expired, PersistError


class Hold:
    """A lease that is renewed until `close`, or until nobody refers to this object. Thread-safe.

    In a fork nothing is renewed and nothing given back: the lease is its parent's.
    """

    def __init__(self, lease: ReadLease, lease_ms: int) -> None:
        self.lease = lease
        self._ended = threading.Event()
        self._finish = weakref.finalize(self, _let_go, lease, self._ended, OwnProcess("a scan"))
        pause_s = lease_ms / 1000 / (2 * LEASE_RENEWED_AFTER)
        # Neither the thread nor what runs at the end may refer to this object: it would never end.
        threading.Thread(target=_renew, args=(lease, self._ended, pause_s), name="persist-hold", daemon=True).start()

    @property
    def is_closed(self) -> bool:
        return self._ended.is_set()

    def close(self) -> None:
        """Give the lease back. Repeating it is safe. Raises nothing: where nobody answers, it lapses by itself."""
        if self._finish.detach() is not None:
            self._ended.set()
            self.lease.close()


def _renew(lease: ReadLease, ended: threading.Event, pause_s: float) -> None:
    while not ended.wait(pause_s):
        try:
            lease.keep()
        except Expired:  # the next read is told
            return
        except PersistError:  # the lease has most of its time left: the next round tries again
            pass


def _let_go(lease: ReadLease, ended: threading.Event, process: OwnProcess) -> None:
    """When nobody refers to the hold any more, or the process ends. This runs wherever that happens to be noticed."""
    if not process.is_left:
        ended.set()
        lease.release()
