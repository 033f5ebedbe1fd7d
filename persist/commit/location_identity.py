"""The identity of a location: its two stores, format version, and fencing by another region."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NoReturn

from blob import Blob, BlobExists, BlobNotFound, BlobStat
from consensus import HIDDEN, Consensus, ConsensusIndeterminate, Entry
from persist.commit.clocks_and_ids import Clock, Moment, moment
from persist.core.errors import InvalidUsage, ReadOnly, Unavailable, UpgradeNeeded
from persist.core.ids import IdSource, LocationBinding
from persist.formats.state_frames import FIRST_FORMAT, THIS_BUILD, Build, decode_binding, encode_binding
from persist.formats.store_errors import translated

LOOK_EVERY_S = 10.0  # for which a check permits commits
TURN_WAIT_S = 5.0  # to wait for another thread's check before checking as well, since that one may hang
TRIES_MAX = 2  # of a committer


class Looks:
    """Schedules the checks whether another home has taken over. Thread-safe.

    `look` is called with the number of the check; later checks have higher numbers.

    While the last check is recent, a committer only compares clock readings. Otherwise it checks, or waits for a check
    that is under way. Time also counts while the machine is suspended, so a check precedes the next write after that.
    """

    def __init__(self, look: Callable[[int], object], clock: Clock) -> None:
        self._look = look
        self._clock = clock
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._begun = 0
        self._ended = 0  # the last one that has
        self._tried: Moment | None = None  # when the last check was, successful or not
        self._succeeded: Moment | None = None  # when the last successful check began

    @property
    def is_due(self) -> bool:
        """Whether a check has to precede the next commit. Compares clock readings only."""
        tried = self._tried
        return tried is None or tried.passed_s(self._clock) >= LOOK_EVERY_S

    @property
    def silent_s(self) -> float:
        """Seconds since the last successful check; infinite if there was none."""
        succeeded = self._succeeded
        return math.inf if succeeded is None else succeeded.passed_s(self._clock)

    def forget(self) -> None:
        """Forget all checks, so that one is due."""
        with self._lock:
            self._tried = self._succeeded = None

    def now(self) -> None:
        """Check now. Raises what `look` raises."""
        with self.turn():
            self._one()

    def if_due(self) -> None:
        """Check if that is due, or wait for a check that is under way. Raises what `look` raises, if it was called.

        A check that failed and took long is repeated: this process may have been suspended meanwhile.
        """
        with self.turn():
            for tries in range(1, TRIES_MAX + 1):
                if not self.is_due:
                    return
                try:
                    self._one()
                except Unavailable:
                    if tries == TRIES_MAX or not self.is_due:
                        raise

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Allow one check at a time, unless the one before takes long."""
        has_it = self._turn.acquire(timeout=TURN_WAIT_S)
        try:
            yield
        finally:
            if has_it:
                self._turn.release()

    def succeeded(self, began: Moment) -> None:
        """Note that another comparison, begun at this moment, had the same result as a successful check."""
        with self._lock:
            self._tried = self._succeeded = began

    def _one(self) -> None:
        with self._lock:
            self._begun += 1
            number = self._begun
        began = moment(self._clock)
        try:
            self._look(number)
        except Unavailable:
            # Counts from its end, so that a broken link delays no commit. After a suspension it counts from its begin.
            took_long = began.passed_s(self._clock) >= LOOK_EVERY_S
            self._end(number, began if took_long else moment(self._clock), None)
            raise
        except BaseException:
            self._end(number, None, None)
            raise
        self._end(number, began, began)

    def _end(self, number: int, tried: Moment | None, succeeded: Moment | None) -> None:
        with self._lock:
            if number < self._ended:  # it hung, and a later one was quicker
                return
            self._ended, self._tried = number, tried
            if succeeded is not None:
                self._succeeded = succeeded


ID_KEY = "location-id"
LOG_KEY = HIDDEN + "binding"
EPOCHS = "epoch/"
COPY_KEY = "copy-of"  # marks a store as a copy of another one: deletions there affect no home
FIRST_EPOCH = 1
SHARDS_TRIED = 10  # of a location without a binding: one of these must have its rollup in the blob store
CONFIRM_EVERY_S = 5.0  # for which a comparison permits deletions
EPOCHS_MAX = 10_000  # of one location; each is of a recovery, or of another home
_OF_A_SHARD = re.compile(r"s[0-9a-f]{32}/")


def ensure_id(blob: Blob, ids: IdSource) -> str:
    """The id of the blob store's location, which is written if it has none. Raises BlobError."""
    with contextlib.suppress(BlobNotFound):
        return blob.get(ID_KEY).decode("ascii", "replace")
    with contextlib.suppress(BlobExists):  # another process was quicker
        blob.put(ID_KEY, ids.uuid7().encode())
    return blob.get(ID_KEY).decode("ascii", "replace")


class Identity:
    """Compares the two stores of one location. Thread-safe. Every method may raise Unavailable.

    At first use the two stores of a location are bound: the same record, a `LocationBinding`, is put into both. Every
    process compares them when it opens the location, and again before it deletes anything. So stores that were paired
    by mistake, and a store that was emptied or replaced, are refused before they can damage each other.

    - The blob store holds the location's id, `location-id`, which is random and written once, and for each epoch the
      binding, `epoch/1`, `epoch/2`, …, each written once.
    - The consensus store holds the bindings as a log under a hidden key, which no shard can have.

    The order of the writes makes it safe to be killed at any point: the id, an offer in the blob store, the log, the
    epoch in the blob store. If several processes bind at once, the log decides. If two logs are bound to one blob
    store, the blob store decides.
    """

    def __init__(
        self,
        blob: Blob,
        consensus: Consensus,
        ids: IdSource,
        clock: Clock,
        build: Build = THIS_BUILD,
        *,
        shows_no_copy: bool = False,
    ) -> None:
        self._shows_no_copy = shows_no_copy
        self._blob = blob
        self._consensus = consensus
        self._ids = ids
        self._clock = clock
        self._build = build
        self._lock = threading.Lock()
        self._binding: LocationBinding | None = None
        self._newer = False  # whether the blob store has a later epoch
        self._newer_by = 0  # the number of the check that found it
        self._copied: InvalidUsage | Unavailable | None = None  # the error if the store has become a copy
        self._elsewhere: Callable[[], ReadOnly | None] | None = None
        self._taken: ReadOnly | None = None  # why this process only reads, as `_elsewhere` found
        self._taken_by = 0
        self._fence_after_s: float | None = None  # a process that could not check for so long stops writing
        self._looks = Looks(self._look, clock)

    def check(self) -> LocationBinding:
        """The binding of the stores. They are compared once, and bound if they are new.

        Raises InvalidUsage: they do not belong together, with the remedy. With `shows_no_copy` also if the blob store
        of an old home is a copy of a later one; Unavailable if it became one while this process was running.
        """
        binding = self.binding()
        self.refuse_copy()
        return binding

    def refuse_copy(self) -> None:
        """Raise the error of `check` if the store is known to be a copy. Calls no store."""
        if (copied := self._copied) is not None:
            raise type(copied)(copied.message)

    def binding(self) -> LocationBinding:
        """As `check`, but also succeeds if the blob store has become a copy."""
        binding = self._binding
        if binding is None:
            with self._looks.turn():
                binding = self._binding
                if binding is None:
                    began = moment(self._clock)
                    binding = self._compare(0)
                    if self._elsewhere is None:
                        self._looks.succeeded(began)
        return binding

    def check_writable(self) -> None:
        """As `check`, and check that no other home has taken over, unless that was checked within LOOK_EVERY_S.

        Also raises ReadOnly: another home has taken over; the error names its servers if the index does. Unavailable:
        this process could not check for so long that it stops writing. Nothing was written.
        """
        binding = self.binding()
        if self._looks.is_due:
            with contextlib.suppress(Unavailable):
                self._looks.if_due()
        taken = self._taken
        if self._newer:
            home = [] if taken is None else taken.details["home"]
            there = f", or write at {', '.join(home)}" if home else ""
            raise ReadOnly(
                f"{self._consensus.url} is at epoch {binding.epoch} and {self._blob.url} at a later one, so another "
                f"consensus store has taken over: this process only reads; give it the newer consensus store{there}",
                home=home,
                region="" if taken is None else taken.details["region"],
            )
        if taken is not None:
            raise ReadOnly(taken.message, **taken.details)
        if self._fence_after_s is not None and (silent_s := self._looks.silent_s) >= self._fence_after_s:
            since = "since it started" if math.isinf(silent_s) else f"for {silent_s:.0f} s"
            raise Unavailable(
                f"this process could not check {since} whether another home of {self._blob.url} has taken over; it "
                "refuses writes until it can"
            )

    def named(self, error: ReadOnly) -> ReadOnly:
        """The refusal of a write, with the servers of the home that has taken over if they are known."""
        taken = self._taken
        if error.details.get("home") or taken is None or not taken.details["home"]:
            return error
        details = {**error.details, "home": taken.details["home"], "region": taken.details["region"]}
        return ReadOnly(f"{error.message}, at {', '.join(taken.details['home'])}", **details)

    def check_no_copy(self, *, if_due: bool = False) -> None:
        """After a failure: check whether the store has become a copy, and raise the error of `check` if so.

        Does nothing without `shows_no_copy`. `if_due`: nor soon after another check.
        """
        if self._shows_no_copy:
            with contextlib.suppress(Unavailable):
                self._looks.if_due() if if_due else self._looks.now()
            self.check()

    def look_elsewhere(self, look: Callable[[], ReadOnly | None], fence_after_s: float | None) -> None:
        """Let checks call `look` too, which returns the refusal if another home has taken over, or raises Unavailable.

        `fence_after_s`: if no check has succeeded for so long, or none yet, this process refuses writes. None: never.
        """
        self._elsewhere, self._fence_after_s = look, fence_after_s
        self._looks.forget()

    def check_home(self) -> None:
        """Check whether another home has taken over. Raises Unavailable (not known now), InvalidUsage."""
        self._looks.now()

    def _look(self, number: int) -> None:
        self._compare(number)
        taken = None if self._elsewhere is None else self._elsewhere()
        with self._lock:
            if number >= self._taken_by:
                self._taken, self._taken_by = taken, number

    def confirm(self) -> None:
        """Before a deletion: compare the stores again, unless that was done within CONFIRM_EVERY_S.

        Raises the errors of `check_writable`. If the stores are exchanged within CONFIRM_EVERY_S after the comparison,
        blobs of another location may be deleted.
        """
        self.binding()
        if self._looks.silent_s >= CONFIRM_EVERY_S:
            self.check_home()
        self.check_writable()

    def _compare(self, number: int) -> LocationBinding:
        """Compare the stores, and bind them if neither is bound. `number`: that of the check."""
        entry = self._entry() or self._bound()
        binding = decode_binding(entry.data, self._build)
        known = self._binding
        if known is not None and known.location_id != binding.location_id:
            self._refuse("now belong to another location than when this process opened them; restart it")
        key = epoch_key(binding.epoch)
        with translated():
            held = self._held(key)
            if held is None:
                self._finish_binding(binding, entry.data)
                held = self._held(key)
            if held is None or decode_binding(held, self._build) != binding:
                self._refuse("are stores of two locations: give two that belong together")
            newer = self._has_later(binding.epoch)
            # A home that was a copy, and was killed before its mark was deleted, has the last epoch.
            is_copy = newer and self._shows_no_copy and self._blob.stat(COPY_KEY) is not None
        with self._lock:
            if number >= self._newer_by:  # a check that hung does not overrule a later one
                self._copied = (self._copied or self._said_of_copy(known is not None)) if is_copy else None
                self._newer, self._newer_by, self._binding = newer, number, binding
        return binding

    def _said_of_copy(self, was_home: bool) -> InvalidUsage | Unavailable:
        url = self._blob.url
        return (Unavailable if was_home else InvalidUsage)(
            f"this store is a copy now: {url} was made one of another home by `persist region demote`; serve it by "
            f"`persist serve --read-only --blob {url}`"
        )

    def _has_later(self, epoch: int) -> bool:
        """Whether the blob store has any later epoch: a copy may lack some in between."""
        listed = list(islice(self._blob.list(EPOCHS), EPOCHS_MAX + 1))
        if len(listed) > EPOCHS_MAX:
            self._refuse(f"have more than {EPOCHS_MAX} blobs {EPOCHS}…; each recovery and switch makes one")
        return any(number > epoch for number in _numbers(listed))

    def _bound(self) -> Entry:
        """The binding of stores whose log has none: created now, unless this log cannot belong to the blob store."""
        with translated():
            names = self._consensus.keys("", "", SHARDS_TRIED)
            taken = self._blob.stat(epoch_key(FIRST_EPOCH)) is not None
            full = any(_OF_A_SHARD.match(stat.key) for stat in self._blob.list("s")) if not names else False
        if (taken or full) and (entry := self._entry()) is not None:
            return entry  # another process was binding them just now
        if taken:
            self._refuse(
                "do not belong together: the blob store was bound to another consensus store, or this one has lost "
                "all. Give the two that belong together; each location needs a blob store, or a prefix, of its own. If "
                "the consensus store is lost, `persist backup recover` makes it anew from the blob store"
            )
        if full:
            self._refuse(
                "do not belong together: the consensus store is empty, and the blob store has shards. Give or "
                "restore the consensus store of these shards; a new location needs an empty blob store, or a prefix"
            )
        if names:
            self._refuse(
                "do not belong together: the consensus store has shards, and the blob store was bound to none. Give or "
                "restore the blob store of these shards"
            )
        with translated():
            location_id = ensure_id(self._blob, self._ids)
            binding = LocationBinding(location_id, FIRST_EPOCH, self._ids.uuid7())
            data = encode_binding(binding)
            self._blob.put(_offer_key(binding), b"")
            with contextlib.suppress(ConsensusIndeterminate):  # the entry below shows whose binding is in the log
                self._consensus.compare_and_set(LOG_KEY, 1, data)
        entry = self._entry()
        if entry is None:
            raise Unavailable(f"{self._consensus.url} did not take the binding of this location; retry")
        return entry

    def _finish_binding(self, binding: LocationBinding, data: bytes) -> None:
        """Put the binding of the log into the blob store of the same location, after its process was killed."""
        if self._blob.stat(_offer_key(binding)) is None:
            self._refuse(
                "are stores of two locations, or the blob store was emptied: give or restore that of this location"
            )
        with contextlib.suppress(BlobExists):
            self._blob.put(epoch_key(binding.epoch), data)

    def _entry(self) -> Entry | None:
        with translated():
            return self._consensus.head(LOG_KEY)

    def _held(self, key: str) -> bytes | None:
        try:
            return self._blob.get(key)
        except BlobNotFound:
            return None

    def _refuse(self, why: str) -> NoReturn:
        raise InvalidUsage(f"{self._blob.url} and {self._consensus.url} {why}")


def epochs_in(blob: Blob) -> list[int]:
    """The epochs whose bindings the blob store has, ascending. A copy may lack some. Raises BlobError."""
    return sorted(_numbers(blob.list(EPOCHS)))


def _numbers(listed: Iterable[BlobStat]) -> Iterator[int]:
    numbers = (stat.key.removeprefix(EPOCHS) for stat in listed)
    return (int(number) for number in numbers if number.isdecimal())


def _offer_key(binding: LocationBinding) -> str:
    """The key that shows that a binding in the log was made for this blob store."""
    return f"offer/{binding.pair}"


def epoch_key(epoch: int) -> str:
    """The key of the binding of this epoch in the blob store."""
    return f"{EPOCHS}{epoch}"


# The format version of a location: the version of the durable bytes that are written there.
#
# Every build writes the format version of the location, not the newest one that it knows, so that two builds can serve
# one location. An administrator raises the version when no older build is left. A new location has the newest version
# of the build that creates it. The version is stored as write-once blobs, `format/2`, `format/3`, …: it is the last of
# them without a gap, and 1 without any.


FORMATS = "format/"


def read_format(blob: Blob, build: Build) -> int:
    """The format version of the location. Raises UpgradeNeeded when the build does not know it."""
    version = FIRST_FORMAT
    with translated():
        while blob.stat(_key(version + 1)) is not None:
            version += 1
    if version not in build.formats:
        raise UpgradeNeeded(
            f"this location has format version {version}; this persist knows {build.known}: upgrade persist"
        )
    return version


def raise_format(blob: Blob, build: Build) -> tuple[int, int]:
    """Switch on the newest format version of the build; the versions before and after. Safe to repeat."""
    before, after = read_format(blob, build), build.newest
    for version in range(before + 1, after + 1):
        with translated(), contextlib.suppress(BlobExists):  # another process raises it as well
            blob.put(_key(version), b"")
    return before, after


def _key(version: int) -> str:
    return f"{FORMATS}{version}"
