"""A hold for as long as something refers to it: it is given back when nothing does any more."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from persist.client.lease import LEASE_RENEWED_AFTER
from persist.commit.system import OwnProcess
from persist.core.errors import Expired, PersistError


class Lease(Protocol):
    """What keeps rows readable: one lease, or several."""

    def keep(self) -> None: ...

    def close(self) -> None: ...

    def release(self) -> None: ...


class Hold:
    """A lease until `close`, or until nothing refers to this object. Thread-safe.

    With `lease_ms` a thread renews it; without, reading renews it. In a fork nothing is renewed and nothing is given
    back: the lease belongs to the parent.
    """

    def __init__(self, lease: Lease, lease_ms: int | None = None) -> None:
        self.lease = lease
        self._ended = threading.Event()
        self._finish = weakref.finalize(self, _let_go, lease, self._ended, OwnProcess("a hold"))
        if lease_ms is not None:
            pause_s = lease_ms / 1000 / (2 * LEASE_RENEWED_AFTER)
            # Neither the thread nor what runs at the end may refer to this object: it would never end.
            threading.Thread(
                target=_renew, args=(lease, self._ended, pause_s), name="persist-hold", daemon=True
            ).start()

    @property
    def is_closed(self) -> bool:
        return self._ended.is_set()

    def keep(self) -> None:
        """Renew the lease if a part of it has passed. Raises Expired: it is gone."""
        self.lease.keep()

    def close(self) -> None:
        """Give the lease back. Repeating it is safe. Raises nothing: if no store answers, the lease lapses."""
        self._finish.detach()
        self._ended.set()
        self.lease.close()

    def release(self) -> None:
        """As `close`, for a generator that is left, which a garbage collection may do. Raises nothing."""
        self._finish()

    def outlive(self) -> None:
        """Keep the lease when nothing refers to this object: another process uses it. `close` still gives it back."""
        self._finish.detach()


def _renew(lease: Lease, ended: threading.Event, pause_s: float) -> None:
    while not ended.wait(pause_s):
        try:
            lease.keep()
        except Expired:  # the next read is told
            return
        except PersistError:  # the lease has most of its time left: the next round tries again
            pass


def _let_go(lease: Lease, ended: threading.Event, process: OwnProcess) -> None:
    """When nothing refers to the hold any more, or the process ends. This runs wherever that happens to be noticed."""
    if not process.is_left:
        ended.set()
        lease.release()
