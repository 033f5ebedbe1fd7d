"""Read leases, their renewal for as long as something refers to them, and critical readers."""

from __future__ import annotations

import math
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field, replace

from persist.client import deadlines
from persist.client.arguments import check_numbers
from persist.client.deadlines import Timeable
from persist.client.idempotency import send
from persist.client.lease_pool import run_aside
from persist.client.transport import Transport
from persist.client.write import WriteSettings
from persist.commit.clocks_and_ids import OwnProcess
from persist.core import commands as c
from persist.core.errors import Expired, Indeterminate, InvalidUsage, PersistError, Unavailable
from persist.core.frontier import Antichain, frontier
from persist.core.ids import ReaderId, SeqNo, mint
from persist.parts.part_files import DecodeLimit

LEASE_RENEWED_AFTER = 3  # a lease is renewed when a third of it has passed
UNHELD = ReaderId("")  # the reader of a lease without a hold: the store can be read but not written
CLOSE_RETRY_S = 5.0  # how long releasing a hold is retried


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """`memory_bytes` bounds what one split holds while it consolidates, and what a listener takes for one event.

    `bound`: a read of row groups that take more is refused (InvalidUsage). It is for servers, which read parts that
    any client may have written.
    """

    lease_ms: int = 900_000
    retry_s: float = 120.0
    memory_bytes: int = 256 * 1024 * 1024
    bound: DecodeLimit | None = None

    def __post_init__(self) -> None:
        check_numbers(self)

    def shared_by(self, reads: int) -> ReadSettings:
        """The settings of each of several reads that share the memory."""
        return replace(self, memory_bytes=max(1, self.memory_bytes // reads))


@dataclass(frozen=True, slots=True)
class HandleSettings:
    """Settings of the readers and writers of a client."""

    write: WriteSettings = field(default_factory=WriteSettings)
    read: ReadSettings = field(default_factory=ReadSettings)


class ReadLease(Timeable):
    """A leased reader of a shard, renewed while it is used. Raises Expired once it lapsed: `Shard.open_reader` anew.

    `seqno`: its holder relies on the States from there on. A later hold of this reader is not the holder's.

    When another process took the lease is not known here, so then the first `keep` renews it.
    """

    def __init__(self, transport: Transport, name: str, reader: ReaderId, settings: ReadSettings, seqno: SeqNo) -> None:
        self._transport = transport
        self._name = name
        self._settings = settings
        self.reader = reader
        self.seqno = seqno
        self.since = Antichain(0)
        self.is_point = False
        self._renewed_s = -math.inf
        self._closed = False

    def __repr__(self) -> str:
        return f"ReadLease({self._name!r}, since={self.since}, {self.reader})"

    @classmethod
    def open(
        cls,
        transport: Transport,
        name: str,
        since: Antichain | None,
        purpose: str,
        settings: ReadSettings,
        *,
        must_hold: bool = True,
    ) -> ReadLease:
        """Take a hold on the shard `name` at `since` (None: the shard's own); lists of readers show its `purpose`.

        Users call `Shard.open_reader`, which provides `transport` and `settings`. `must_hold`: as in `taken`. Raises
        NotReadable (the shard's since is beyond `since`).
        """

        def register() -> ReadLease:
            command = c.RegisterReader(mint(ReaderId, transport.ids), since, settings.lease_ms, purpose)
            return register_lease(transport, name, command, settings, must_hold=must_hold)

        try:
            return register()
        except Expired:  # the answer came so late that the lease had lapsed
            return register()

    @property
    def is_held(self) -> bool:
        """Whether it holds anything. A read without a hold is exact, and ends by Expired if a blob is gone."""
        return self.reader != UNHELD

    def keep(self) -> None:
        """Renew the lease if a third of it has passed. Call between pieces of work. Raises Expired: it is gone."""
        now = self._transport.clock.monotonic()
        lease_s = self._settings.lease_ms / 1000
        if now - self._renewed_s < lease_s / LEASE_RENEWED_AFTER:
            return
        self.renew()

    def renew(self) -> None:
        """Renew the lease now, if there is one and the store can be written. Raises Expired if it is gone."""
        if not self.is_held:
            return
        now = self._transport.clock.monotonic()
        try:
            self.check()
        except Unavailable as error:
            if not error.is_unwritable:
                raise
            self._renewed_s = now  # the read continues; if the lease lapses and a blob is deleted, it gets Expired

    def check(self) -> None:
        """Renew the lease now. Raises Expired if it is gone, and Unavailable if it holds nothing."""
        if not self.is_held:
            message = f"no hold on shard {self._name!r} can be taken: its store cannot be written"
            raise Unavailable(message, writable=False)
        now = self._transport.clock.monotonic()
        self._send(c.DowngradeSince(self.reader, None, self.seqno, moves_since=False))
        self._renewed_s = now

    def downgrade(self, since: Antichain, seqno: SeqNo) -> None:
        """Give up reads before `since`, and States before `seqno`. The shard's since follows, but never beyond the
        latest complete time.

        `[]` holds nothing: since then depends on the other readers, and stays if there are none. Raises Expired (the
        lease is gone), InvalidUsage (`since` is beyond the upper).
        """
        if (shared := self._transport.leases) is not None:  # unused readers must not hold since back
            shared.let_go(self._name)
        self.move(frontier(since), seqno, moves_since=True)

    def move(self, since: Antichain, seqno: SeqNo, *, moves_since: bool) -> None:
        """As `downgrade` to `since` and `seqno`; unless it `moves_since`, the shard's since stays. Raises Expired."""
        now = self._transport.clock.monotonic()
        # Given up from now on, even if the answer is lost: a State before `seqno` may name blobs that are deleted.
        self.since, self.seqno = max(self.since, since), max(self.seqno, seqno)
        moved = self._send(c.DowngradeSince(self.reader, self.since, self.seqno, moves_since))
        assert isinstance(moved, c.SinceDowngraded)
        if moved.reader_since > self.since:  # a later hold of this reader; see DowngradeSince
            raise Expired(f"the hold on shard {self._name!r} at {since} is gone: the lease lapsed; read or listen anew")
        self._renewed_s = now

    def close(self) -> None:
        """Release the hold. Repeating it is safe. Raises nothing: if no store answers, it lapses."""
        if self._closed:
            return
        self._closed = True
        if deadlines.has_passed():  # the caller does not wait, but the hold must still be released
            run_aside(self._expire, 0.0)
        else:
            self._expire()

    def _expire(self) -> None:
        with suppress(PersistError):  # also in a forked child, where the lease belongs to the parent
            self._send(c.ExpireReader(self.reader), CLOSE_RETRY_S)

    def release(self) -> None:
        """As `close`, for a garbage collection, which may run while this thread holds a lock. Raises nothing."""
        if not self._closed:
            run_aside(self.close, CLOSE_RETRY_S)

    def outlive(self) -> None:
        """The reads continue in another process, which renews the lease by its id. Raises nothing."""

    def _send(self, command: c.Command, retry_s: float | None = None) -> c.Result:
        bound_s = self._settings.retry_s
        return send(self._transport, self._name, command, bound_s if retry_s is None else min(retry_s, bound_s))


def register_lease(
    transport: Transport, name: str, command: c.RegisterReader, settings: ReadSettings, *, must_hold: bool = True
) -> ReadLease:
    """The hold that a command takes. If it is not answered in time, it may still land: then it is released.

    Unless it `must_hold`, the lease holds nothing if the store can be read but not written. Raises as the command.
    """
    lease = ReadLease(transport, name, command.reader, settings, SeqNo(0))
    requested_s = transport.clock.monotonic()  # the first try may have landed long before a later one is answered
    result: c.Result | None
    try:
        result = send(transport, name, command, settings.retry_s)
    except (Unavailable, Indeterminate) as error:
        if deadlines.has_passed():
            lease.close()
        if must_hold or (result := _would_hold(error)) is None:
            raise
        lease.reader, lease._closed = UNHELD, True
    assert isinstance(result, c.ReaderRegistered)
    lease.seqno, lease.since, lease._renewed_s = result.seqno, result.since, requested_s
    lease.is_point = command.point
    lease.keep()
    return lease


def _would_hold(error: PersistError) -> c.ReaderRegistered | None:
    """The hold as it would be if the store could be written; None: the error is another one."""
    if not isinstance(error, Unavailable) or not error.is_unwritable:
        return None
    try:
        since, upper = (Antichain.from_json(error.details[name]) for name in ("since", "upper"))
        return c.ReaderRegistered(since, upper, SeqNo(int(error.details["seqno"])))
    except (KeyError, TypeError, ValueError, InvalidUsage):
        return None


class Hold:
    """Some leases until `close`, or until nothing refers to this object. Thread-safe.

    With `lease_ms` a thread renews them; without, reading does. In a fork nothing is renewed or released: the leases
    belong to the parent.
    """

    def __init__(self, *leases: ReadLease, lease_ms: int | None = None) -> None:
        self.leases = leases
        self._ended = threading.Event()
        self._process = OwnProcess("a hold")
        self._finish = weakref.finalize(self, _release, leases, self._ended, self._process)
        if lease_ms is not None:
            pause_s = lease_ms / 1000 / (2 * LEASE_RENEWED_AFTER)
            # Neither the thread nor the finalizer may refer to this object: it would never be collected.
            renewed = leases, self._ended, pause_s
            threading.Thread(target=_renew, args=renewed, name="persist-hold", daemon=True).start()

    @property
    def is_closed(self) -> bool:
        return self._ended.is_set()

    @property
    def is_left(self) -> bool:
        """Whether this is a fork of the process that took it."""
        return self._process.is_left

    def keep(self) -> None:
        """Renew the leases of which a third has passed. Raises Expired: one is gone."""
        for lease in self.leases:
            lease.keep()

    def close(self) -> None:
        """Release the leases. Repeating it is safe. Raises nothing: if no store answers, they lapse."""
        self._finish.detach()
        self._ended.set()
        for lease in self.leases:
            lease.close()

    def release(self) -> None:
        """As `close`, for an abandoned generator, which a garbage collection may close. Raises nothing."""
        self._finish()

    def outlive(self) -> None:
        """Keep the leases when nothing refers to this: another process uses them. `close` still releases them."""
        self._finish.detach()
        for lease in self.leases:
            lease.outlive()


def _renew(leases: tuple[ReadLease, ...], ended: threading.Event, pause_s: float) -> None:
    while not ended.wait(pause_s):
        try:
            for lease in leases:
                lease.keep()
        except Expired:  # the next read gets the error
            return
        except PersistError:  # a lease has most of its time left: the next round tries again
            pass


def _release(leases: tuple[ReadLease, ...], ended: threading.Event, process: OwnProcess) -> None:
    """Runs when nothing refers to the hold any more, or the process ends, on any thread."""
    if not process.is_left:
        ended.set()
        for lease in leases:
            lease.release()
