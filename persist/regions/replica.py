"""A replica: a location that shows a copy of another one's blob store, read-only.

It only needs that store, and writes nothing to it. Leases are answered here, and held at home if there is a link
(`remote_holds.py`). What is deleted at home, and then here, ends reads of old versions with Expired.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from blob import Blob, BlobNotFound, open_blob, without_secrets
from blob.blob_urls import may_exist
from blob.interface import Unfinished
from consensus import Consensus, ConsensusNotWritable, Entry
from consensus.interface import Wanted
from consensus.notify import Notifier
from persist.client.embedded import EmbeddedTransport
from persist.client.transport import Transport
from persist.commit.background_duties import Upkeep
from persist.commit.clocks_and_ids import Clock, System, SystemClock
from persist.commit.commit_plan import Outcome
from persist.commit.committer import Machine
from persist.commit.location import Location, LocationSettings, directory_urls
from persist.commit.location_identity import CONFIRM_EVERY_S, ID_KEY, Identity, epoch_key, epochs_in
from persist.commit.state_loader import Versions
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import HistoryLost, InvalidUsage, PersistError, ReadOnly, Unavailable, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import IdSource, LocationBinding, SeqNo
from persist.core.shard_view import SeenVersion
from persist.core.state import State
from persist.core.transitions.context import SOUND, Verdict
from persist.formats.state_frames import Build, decode_binding
from persist.formats.store_errors import translated
from persist.inspect.readonly_location import ReadOnlyBlob
from persist.regions.remote_holds import HomeHolds
from persist.regions.replica_follower import POLL_S, Follower

HOLD_EVERY_S = 5.0  # between rounds of holds at home
log = logging.getLogger("persist.regions")


@dataclass(frozen=True, slots=True)
class Home:
    """Where writes go: the region's name ("": unknown), and the URLs of servers there."""

    region: str = ""
    urls: tuple[str, ...] = ()

    def refusal(self, what: str) -> ReadOnly:
        """The error for a request of `what` to this copy."""
        where = f"region {self.region!r}" if self.region else "home"
        at = f", at {', '.join(self.urls)}" if self.urls else ""
        return ReadOnly(
            f"this is a read-only copy: {what} is only possible at {where}{at}",
            home=list(self.urls),
            region=self.region,
        )


class CopyBlob(ReadOnlyBlob):
    """The blob store of a copy, which refuses writes."""

    def __init__(self, inner: Blob, home: Home) -> None:
        super().__init__(inner, home.refusal)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        return iter(())

    def check(self) -> None:
        """Check that it answers, and has a location. No probe is written."""
        if self.stat(ID_KEY) is None:
            raise BlobNotFound(f"{self.url} has no location")


class ReplicaConsensus(Consensus):
    """Names of shards, and notifications. There are no logs."""

    def __init__(self, follower: Follower, url: str) -> None:
        self._follower = follower
        self._url = url
        self.notifier = Notifier("persist-replica")

    @property
    def url(self) -> str:
        return f"a copy at {self._url}"

    @property
    def value_bytes_max(self) -> int:
        return 0

    def head(self, key: str) -> Entry | None:
        return None

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConsensusNotWritable(f"{self.url} has no logs")

    compare_and_set = begin = truncate = _refuse

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        return []

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        return self._follower.names(prefix, after, limit, with_ended)

    def check(self) -> None:
        """There is nothing to create."""

    def close(self) -> None:
        self.notifier.close()

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        return self.notifier.subscribe(callback, wanted)


class ReplicaIdentity(Identity):
    """The identity of the copy: the id of the location, and the last epoch that has arrived."""

    def __init__(self, blob: Blob, consensus: Consensus, ids: IdSource, clock: Clock, build: Build, home: Home) -> None:
        super().__init__(blob, consensus, ids, clock, build)
        self._home = home
        self._read_s = 0.0

    def check(self) -> LocationBinding:
        """The last epoch that has arrived. Raises Unavailable: there is none yet."""
        now_s = self._clock.monotonic()
        if self._binding is None or now_s - self._read_s >= CONFIRM_EVERY_S:
            self._binding, self._read_s = self._last(), now_s
        return self._binding

    def _last(self) -> LocationBinding:
        with translated():
            epochs = epochs_in(self._blob)
            if not epochs:
                raise Unavailable(f"{self._blob.url} has no location yet: nothing has arrived from home")
            return decode_binding(self._blob.get(epoch_key(epochs[-1])), self._build)

    def check_writable(self) -> None:
        raise self._home.refusal("writing")

    def confirm(self) -> None:
        raise self._home.refusal("deleting")


class ReplicaVersions(Versions):
    """Versions of a copy: it writes none, and upgrades no format version."""

    @property
    def format_version(self) -> int:
        """The newest version that this build can read: home's own may not have arrived yet, and nothing is written."""
        return self.build.newest


class ReplicaMachine(Machine):
    """Shows accepted versions. Answers queries and leases; refuses everything that would change the shard."""

    def __init__(self, name: str, location: ReplicaLocation) -> None:
        super().__init__(
            name,
            location.versions,
            System(location.clock, location.ids, location.background, None, None, location.sight),
            upkeep=Upkeep(location.settings.policy, merges=False),
            nodes=location.nodes,
        )
        self._location = location
        self._follower = location.follower
        self._home = location.home

    def refresh(self) -> State:
        asked_s = self._clock.monotonic()
        state = self._follower.state(self.name)
        if state is None:
            raise UnknownShard(f"there is no shard {self.name!r} here, as far as home has published; create it at home")
        self._leases.saw(state, asked_s, self._clock.monotonic())
        return self.publish(state)

    def check_seen(self, state: State, seen: SeenVersion | None) -> None:
        """Raises Unavailable: the caller has read a later version, of home or of another server of the region.
        HistoryLost: it has read another version with this seqno.
        """
        if seen is None:
            return
        if state.seqno < seen.seqno and (state := self.refresh()).seqno < seen.seqno:
            raise Unavailable(
                f"shard {self.name!r} is at v{state.seqno} here, and the caller has read v{seen.seqno}: wait, or ask "
                "home"
            )
        if state.seqno == seen.seqno and state.commit_id != seen.commit_id:
            raise HistoryLost(
                f"the listener of shard {self.name!r} has read another v{seen.seqno} than this copy shows: home has "
                "lost commits, and two histories were published. Listen again to continue without the last updates"
            )

    def create(self, state: State, follows: str | None = None) -> State:
        raise self._home.refusal("creating a shard")

    def apply(self, command: c.Command, caller: Caller = NOBODY, by_names: bool = False) -> c.Result:
        state = self.refresh()
        if command.shard not in (None, state.shard_id):
            raise UnknownShard(f"shard {self.name!r} was dropped, and its name has another incarnation")
        if not isinstance(command, c.ReadCommand):
            raise self._home.refusal(f"changing shard {self.name!r}")
        if (result := self._answer_hold(command, state)) is not None:
            return result
        outcome, changes = self._stepped(command, state)
        if isinstance(command, c.ResolveTime) and (changes or isinstance(outcome, Unavailable)):
            # Home would settle it now.
            return c.TimeToCome(min(command.at_ms - 1, max(state.walltime_ms, self._follower.published_ms)))
        if isinstance(outcome, BaseException):
            raise outcome
        if changes:
            raise self._home.refusal(f"changing shard {self.name!r}")
        return outcome

    def submit(
        self,
        command: c.Command,
        run: Callable[[Callable[[], None]], object],
        answered: Callable[[Outcome], None],
        verdict: Verdict | None = None,
        caller: Caller = NOBODY,
        all_answered: Callable[[], None] | None = None,
    ) -> None:
        def work() -> None:
            outcome: Outcome
            try:
                outcome = self.apply(command, caller)
            except Exception as error:  # also for a bug: the caller must get an answer
                outcome = error
            try:
                answered(outcome)
            finally:
                if all_answered is not None:
                    all_answered()

        run(work)

    def verdict(self, command: c.Command, by_names: bool = False) -> Verdict:
        return SOUND

    def _answer_hold(self, command: c.Command, state: State) -> c.Result | None:
        """Answer a command on a lease; home is notified later. None: the command is not about a lease."""
        holds = self._location.holds
        if isinstance(command, c.ExpireReader):
            if holds is not None:
                holds.release(self.name, command.reader)
            return c.Done()
        if isinstance(command, c.DowngradeSince):
            if holds is not None:
                holds.renew(self.name, command)
            return c.SinceDowngraded(command.since or state.since, state.since)
        if isinstance(command, c.RegisterReader):
            outcome, _ = self._stepped(command, state)
            if isinstance(outcome, BaseException):
                raise outcome
            assert isinstance(outcome, c.ReaderRegistered)
            if holds is not None:
                holds.register(self.name, command, outcome.since, state.seqno)
            return c.ReaderRegistered(outcome.since, state.upper, state.seqno)
        return None


class ReplicaLocation(Location):
    """A copy as a location. With `watch` it polls in the background; otherwise on requests."""

    is_copy = True

    def __init__(
        self,
        blob: Blob,
        home: Home,
        *,
        poll_s: float = POLL_S,
        settings: LocationSettings | None = None,
        clock: Clock | None = None,
        ids: IdSource | None = None,
    ) -> None:
        copy_blob = CopyBlob(blob, home)
        adjusted = replace(settings or LocationSettings(), collects=None, compares_clock=False, publish=None)
        clock_ = clock or SystemClock()
        self.home = home
        self.follower = Follower(copy_blob, clock_, poll_s, adjusted.build)
        names_store = ReplicaConsensus(self.follower, blob.url)
        super().__init__(copy_blob, names_store, settings=adjusted, clock=clock_, ids=ids)
        self.follower.blob = self.blob  # with metrics, if they are enabled
        self.follower.on_moved = lambda name: names_store.notifier.publish((name,))
        self.identity = ReplicaIdentity(self.blob, self.consensus, self.ids, self.clock, adjusted.build, home)
        self.versions = ReplicaVersions(self.blob, self.consensus, self.ids, adjusted.build, self.identity)
        self.poll_s = self.follower.poll_s
        self.holds: HomeHolds | None = None
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def new_machine(self, name: str) -> Machine:
        return ReplicaMachine(name, self)

    def check(self) -> list[str]:
        """Check that the store answers and has a location. Raises InvalidUsage, Unavailable."""
        with translated():
            if self.blob.stat(ID_KEY) is None:
                raise InvalidUsage(f"{self.blob.url} has no location: give the store to which home is copied")
        self.identity.check()
        return []

    def behind_s(self, name: str) -> float | None:
        followed_shard = self.follower.followed(name)
        shown_ms = self.follower.published_ms if followed_shard is None else followed_shard.shown_ms
        return max(0.0, (self.clock.now_ms() - shown_ms) / 1000)

    def watch(self) -> None:
        """Poll in the background until the location is closed."""
        self._start("polling the copy", self.follower.poll_s, self.follower.poll)
        if self.holds is not None:  # holds are optional, and reads continue without them
            self._start("holding at home", HOLD_EVERY_S, self.holds.round)

    def hold_at(self, home: Callable[[], Transport], region: str) -> None:
        """Hold at home what readers here need; `home` connects to it. Call it before `watch`."""

        def shown_version(name: str) -> tuple[Antichain, SeqNo] | None:
            state = self.machine(name).cached
            return None if state is None else (state.since, state.seqno)

        self.holds = HomeHolds(region, home, shown_version, self.clock)

    def _start(self, what: str, pause_s: float, work: Callable[[], object]) -> None:
        """Work in the background, once in each pause, until the location is closed."""

        def repeat() -> None:
            while not self._ended.wait(pause_s):
                try:
                    work()
                except PersistError:
                    continue  # the follower keeps the error; reads continue with what is there
                except Exception:  # a bug: the work must continue
                    log.exception("%s failed", what)

        thread = threading.Thread(target=repeat, name="persist-region", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        if self.holds is not None:
            self.holds.close()
        super().close()


# Opening a copy by the URL of its blob store. `persist.client.client`, a lower layer, finds this module by name.


def open_replica(url: str, home: Home | None = None, settings: LocationSettings | None = None) -> ReplicaLocation:
    """Open the copy with the blob store at `url`; `persist:///dir` is that of the directory.

    Raises InvalidUsage (the URL is invalid, or there is no location), Unavailable.
    """
    if url.startswith("persist:"):
        url = directory_urls(url, makes=False)[0]
    with translated():
        if not may_exist(url):
            raise InvalidUsage(f"{without_secrets(url)} does not exist")
        blob = open_blob(url)
    replica = ReplicaLocation(blob, home or Home(), settings=settings)
    try:
        replica.check()
    except BaseException:
        replica.close()
        raise
    return replica


def open_transport(connection: Any) -> EmbeddedTransport:
    """The transport of a `Connection` with `read_only`."""
    url = connection.url or connection.blob
    if connection.consensus is not None or not url:
        raise InvalidUsage("read_only requires only the blob store: give a url, or a blob location, and no consensus")
    return EmbeddedTransport(open_replica(url, settings=connection.location))
