"""A replica: a location that shows a copy of another one's blob store, as far as it has come, and only reads.

It needs that store alone, and writes nothing to it. Holds are answered, and kept at home where there is a link
(`holding.py`). What is deleted at home, and then here, ends reads of old versions with Expired.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from blob import Blob, BlobNotFound, open_blob, without_secrets
from blob.blob_urls import may_exist
from blob.interface import Unfinished
from consensus import Consensus, ConsensusNotWritable, Entry
from consensus.interface import Wanted
from consensus.notify import Notifier
from persist.client.embedded import EmbeddedTransport
from persist.client.transport import Transport
from persist.commit.commit_plan import Outcome
from persist.commit.location import Location, LocationSettings, directory_urls
from persist.commit.location_identity import CONFIRM_EVERY_S, ID_KEY, Identity, epoch_key, epochs_in
from persist.commit.machine import Machine, MachineSettings
from persist.commit.state_loader import Versions
from persist.commit.system import Clock, System, SystemClock
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
    """Where writes go: the region's name ("": not known), and the URLs of servers there."""

    region: str = ""
    urls: tuple[str, ...] = ()

    def refusal(self, what: str) -> ReadOnly:
        """The error of who asks this copy for `what`."""
        where = f"region {self.region!r}" if self.region else "home"
        at = f", at {', '.join(self.urls)}" if self.urls else ""
        return ReadOnly(
            f"this is a copy that only reads: {what} is for {where}{at}", home=list(self.urls), region=self.region
        )


class CopyBlob(ReadOnlyBlob):
    """The blob store of a copy: writes are for home."""

    def __init__(self, inner: Blob, home: Home) -> None:
        super().__init__(inner, home.refusal)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        return iter(())

    def check(self) -> None:
        """Whether it answers, and has a location. No probe is written."""
        if self.stat(ID_KEY) is None:
            raise BlobNotFound(f"{self.url} has no location")


class ReplicaConsensus(Consensus):
    """Names of shards, and news of them. There are no logs here."""

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

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        raise ConsensusNotWritable(f"{self.url} has no logs")

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        raise ConsensusNotWritable(f"{self.url} has no logs")

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        return []

    def truncate(self, key: str, seqno: int) -> int:
        raise ConsensusNotWritable(f"{self.url} has no logs")

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        return self._follower.names(prefix, after, limit, with_ended)

    def check(self) -> None:
        """Nothing is to be made."""

    def close(self) -> None:
        self.notifier.close()

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        return self.notifier.subscribe(callback, wanted)


class ReplicaIdentity(Identity):
    """That of the copy: the id of the location, and the last epoch that has come."""

    def __init__(self, blob: Blob, consensus: Consensus, ids: IdSource, clock: Clock, build: Build, home: Home) -> None:
        super().__init__(blob, consensus, ids, clock, build)
        self._home = home
        self._read_s = 0.0

    def check(self) -> LocationBinding:
        """The last epoch that has come. Raises Unavailable: there is none yet."""
        now_s = self._clock.monotonic()
        if self._binding is None or now_s - self._read_s >= CONFIRM_EVERY_S:
            self._binding, self._read_s = self._last(), now_s
        return self._binding

    def _last(self) -> LocationBinding:
        binding: LocationBinding | None = None
        with translated():
            epochs = epochs_in(self._blob)
            if epochs:
                binding = decode_binding(self._blob.get(epoch_key(epochs[-1])), self._build)
        if binding is None:
            raise Unavailable(f"{self._blob.url} has no location yet: nothing has come from home")
        return binding

    def check_writable(self) -> None:
        raise self._home.refusal("writing")

    def confirm(self) -> None:
        raise self._home.refusal("deleting")


class ReplicaVersions(Versions):
    """Versions of a copy: it writes none, and switches no format version on."""

    @property
    def format_version(self) -> int:
        """All that this build can read: nothing is written by it, and how far home is may not have come yet."""
        return self.build.newest


class ReplicaMachine(Machine):
    """Shows what is accepted. Answers questions and holds; refuses what would change the shard."""

    def __init__(self, name: str, location: ReplicaLocation) -> None:
        super().__init__(
            name,
            location.versions,
            System(location.clock, location.ids, location.background, None, None, location.sight),
            policy=location.settings.policy,
            settings=MachineSettings(small_merges=False),
            nodes=location.nodes,
        )
        self._location = location
        self._follower = location.follower
        self._home = location.home

    def refresh(self) -> State:
        asked_s = self._clock.monotonic()
        state = self._follower.state(self.name)
        if state is None:
            raise UnknownShard(f"there is no shard {self.name!r} here, as far as home has published; write it at home")
        self._leases.saw(state, asked_s, self._clock.monotonic())
        return self.publish(state)

    def check_seen(self, state: State, seen: SeenVersion | None) -> None:
        """Raises Unavailable (the caller has read a later version, of home or of another server of the region), and

        HistoryLost (it has read another one of this seqno).
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
                f"who listens to shard {self.name!r} has read another v{seen.seqno} than this copy shows: home has "
                "lost commits, and two histories were published. Listen anew to go on without what was given last"
            )

    def create(self, state: State, follows: str | None = None) -> State:
        raise self._home.refusal("creating a shard")

    def apply(self, command: c.Command, caller: Caller = NOBODY, by_names: bool = False) -> c.Result:
        state = self.refresh()
        if command.shard not in (None, state.shard_id):
            raise UnknownShard(f"shard {self.name!r} was dropped, and its name has another life")
        if not isinstance(command, c.ReadCommand):
            raise self._home.refusal(f"changing shard {self.name!r}")
        if (held := self._held(command, state)) is not None:
            return held
        outcome, changes = self._stepped(command, state)
        if isinstance(command, c.ResolveTime) and (changes or isinstance(outcome, Unavailable)):
            # Home would seal it now.
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
            try:
                answered(self._outcome(command, caller))
            finally:
                if all_answered is not None:
                    all_answered()

        run(work)

    def _outcome(self, command: c.Command, caller: Caller) -> Outcome:
        try:
            return self.apply(command, caller)
        except Exception as error:  # also of a bug: the asker is not left waiting
            return error

    def verdict(self, command: c.Command, by_names: bool = False) -> Verdict:
        return SOUND

    def _held(self, command: c.Command, state: State) -> c.Result | None:
        """The answer to who takes, keeps, moves or gives back a hold; home is told of it later. None: it is no hold."""
        holds = self._location.holds
        if isinstance(command, c.ExpireReader):
            if holds is not None:
                holds.gave_back(self.name, command.reader)
            return c.Done()
        if isinstance(command, c.DowngradeSince):
            if holds is not None:
                holds.kept(self.name, command)
            return c.SinceDowngraded(command.since or state.since, state.since)
        if isinstance(command, c.RegisterReader):
            outcome, _ = self._stepped(command, state)
            if isinstance(outcome, BaseException):
                raise outcome
            assert isinstance(outcome, c.ReaderRegistered)
            if holds is not None:
                holds.took(self.name, command, outcome.since, state.seqno)
            return c.ReaderRegistered(outcome.since, state.upper, state.seqno)
        return None


class ReplicaLocation(Location):
    """A copy as a location. `watch` has news looked for in the background; else only who asks looks for them."""

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
        shown = CopyBlob(blob, home)
        given = replace(settings or LocationSettings(), collects=None, compares_clock=False, publish=None)
        system = clock or SystemClock()
        self.home = home
        self.follower = Follower(shown, system, poll_s, given.build)
        names = ReplicaConsensus(self.follower, blob.url)
        super().__init__(shown, names, settings=given, clock=system, ids=ids)
        self.follower.blob = self.blob  # which counts, where that was asked for
        self.follower.on_moved = lambda name: names.notifier.publish((name,))
        self.identity = ReplicaIdentity(self.blob, self.consensus, self.ids, self.clock, given.build, home)
        self.versions = ReplicaVersions(self.blob, self.consensus, self.ids, given.build, self.identity)
        self.poll_s = self.follower.poll_s
        self.holds: HomeHolds | None = None
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []

    def new_machine(self, name: str) -> Machine:
        return ReplicaMachine(name, self)

    def check(self) -> list[str]:
        """Whether the store answers and has a location. Raises InvalidUsage, Unavailable."""
        with translated():
            if self.blob.stat(ID_KEY) is None:
                raise InvalidUsage(f"{self.blob.url} has no location: give the store to which home is copied")
        self.identity.check()
        return []

    def behind_s(self, name: str) -> float | None:
        found = self.follower.followed(name)
        shown_ms = self.follower.published_ms if found is None else found.shown_ms
        return max(0.0, (self.clock.now_ms() - shown_ms) / 1000)

    def watch(self) -> None:
        """Look for news in the background from now on, until the location is closed."""
        self._start(self._watch)
        if self.holds is not None:
            self._start(self._hold)

    def hold_at(self, home: Callable[[], Transport], region: str) -> None:
        """From now on hold at home what readers here need; `home` opens the way there. Call it before `watch`."""

        def shown(name: str) -> tuple[Antichain, SeqNo] | None:
            state = self.machine(name).cached
            return None if state is None else (state.since, state.seqno)

        self.holds = HomeHolds(region, home, shown, self.clock)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="persist-region", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _hold(self) -> None:
        while self.holds is not None and not self._ends.wait(HOLD_EVERY_S):
            try:
                self.holds.round()
            except Exception:  # a bug: holds are a help, and reads go on without
                log.exception("holding at home failed")

    def _watch(self) -> None:
        while not self._ends.wait(self.follower.poll_s):
            try:
                self.follower.look()
            except PersistError:
                continue  # the follower tells; who reads goes on with what is there
            except Exception:  # a bug: news have to go on
                log.exception("looking for news failed")

    def close(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        if self.holds is not None:
            self.holds.close()
        super().close()


# Opening a copy by the URL of its blob store. Found by name from `persist.client.connect`, which lies below.


def open_replica(
    url: str,
    home: Home | None = None,
    settings: LocationSettings | None = None,
) -> ReplicaLocation:
    """Open the copy whose blob store is at `url`; `persist:///dir` is that of the directory.

    Raises InvalidUsage (the URL makes no sense, or nothing has a location there), Unavailable.
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
        raise InvalidUsage("read_only needs the blob store alone: give a url, or a blob location, and no consensus")
    return EmbeddedTransport(open_replica(url, settings=connection.location))
