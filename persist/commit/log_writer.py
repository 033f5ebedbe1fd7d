"""The settled compare-and-set: it determines whether a state diff is in the log.

A compare-and-set of unknown outcome is repeated with the same bytes at the same seqno until the store gives a definite
answer. If the answer is that the race was lost, the winner may be an earlier try of this process, which the commit id
in the log shows. So callers receive Indeterminate only if the store is unavailable until their deadline.

This process checks that it may write before each try, and again before a write counts as done: while it waited for the
store another home may have taken over, which does not know the write. A diff that only moves holds is always written.
"""

from __future__ import annotations

from consensus import ConsensusError, ConsensusIndeterminate, ConsensusNotWritable, ConsensusUnavailable
from persist.commit.clocks_and_ids import System, jittered
from persist.commit.state_loader import Versions
from persist.core.errors import Indeterminate, InvalidUsage, PersistError, Unavailable
from persist.core.state_diff import StateDiff, only_holds, referring_to
from persist.formats.store_errors import translate, translated
from persist.telemetry.metrics import MachineMetrics

LONG_DIFF_BYTES_MAX = 256 * 1024 * 1024  # about a million parts
BACKOFF_FIRST_S = 0.004
BACKOFF_MAX_S = 1.0
LOST_FIRST_S = 0.001
LOST_MAX_S = 0.02  # a lost race does not mean that the store is slow, and a process that waits long keeps losing


class TooLarge(InvalidUsage):
    """A state diff is too large for the consensus store. It was not written."""


class LogWriter:
    """Writes to the log of the shard `name`. Thread-safe. Deadlines are of the system's monotonic clock."""

    def __init__(self, name: str, versions: Versions, system: System, metrics: MachineMetrics) -> None:
        self._name = name
        self._versions = versions
        self._system = system
        self._metrics = metrics
        self.request_id = ""  # of a request in the current group, for log lines

    def write(self, change: StateDiff, deadline: float, long_diff: str = "", ends: bool = False) -> int:
        """Write this state diff to the log; return its size there in bytes, or 0 if it has to be planned again.

        That is so if another commit has its seqno, or if this process has read another State meanwhile, perhaps of
        another history: a diff is written only after the entry of the State on which it was planned. `ends`: the shard
        is dropped after it.

        `long_diff`: the diff is written to the blob of this key, which its State names, and the log only refers to it.
        TooLarge: the diff is too large for the store. Unavailable: it is definitely not in the log. Indeterminate:
        it may be.
        """
        after = self._versions.beginning(self._name, change.parent_id)
        if not after:
            return 0
        data = self._versions.encode(change, ends)
        most = LONG_DIFF_BYTES_MAX if long_diff else self._versions.consensus.value_bytes_max
        if len(data) > most:
            raise TooLarge(
                f"a command on shard {self._name!r} takes {len(data)} bytes in its log, of which {most} are possible; "
                "write fewer or larger parts at once"
            )
        if long_diff:
            with translated():
                self._versions.blob.put(long_diff, data)
            data = self._versions.encode(referring_to(change, long_diff, len(data)), ends)
        holds = only_holds(change)
        won, was_unknown = self.compare_and_set(change.seqno, data, deadline, after, holds=holds)
        if won or (was_unknown and self.is_ours(change, deadline)):
            self.settled(change.commit_id, data, holds=holds)
            return len(data)
        return 0

    def settled(self, commit_id: str, data: bytes, *, holds: bool = False) -> None:
        """Note that this entry is the newest one of the log.

        Raises Indeterminate: it is in the log, but perhaps of a home that another one has replaced, so its commands
        must not be acknowledged.
        """
        self._versions.ends(self._name, commit_id, data)
        if self._system.publisher is not None:
            self._system.publisher.add(self._name, data)
        if not holds:
            try:
                self._versions.identity.check_writable()
            except PersistError as error:
                raise self._unsure(error) from error

    def compare_and_set(
        self, seqno: int, data: bytes, deadline: float, after: bytes = b"", *, holds: bool = False
    ) -> tuple[bool, bool]:
        """One compare-and-set, repeated while the store gives no definite answer. `after`: how the entry before begins.

        Whether the last try won, and whether the outcome of an earlier one is unknown. `holds`: the entry only moves
        holds. Raises also what `Identity.check_writable` raises.
        """
        unknown: ConsensusError | None = None
        tries = 0
        while True:
            if not holds:
                try:
                    self._versions.identity.check_writable()
                except PersistError as error:
                    if unknown is None:
                        raise
                    raise self._unsure(error) from error
            try:
                won = self._versions.consensus.compare_and_set(self._name, seqno, data, after)
                return won, unknown is not None
            except (ConsensusUnavailable, ConsensusIndeterminate) as error:
                if isinstance(error, ConsensusIndeterminate):
                    unknown = error
                elif isinstance(error, ConsensusNotWritable) and (unknown is None or error.is_read_only):
                    # A full disk is not waited for: who could free it needs us.
                    raise (translate(error) if unknown is None else self._unsure(error)) from error
                tries += 1
                self._metrics.retries += 1
                self._system.sight.storms.again("committer", self._name, tries, error, self.request_id)
                if self._system.clock.monotonic() > deadline:
                    raise translate(unknown or error) from error
                self.back_off(tries)
            except ConsensusError as error:
                if unknown is not None:  # this try did not happen, but an earlier one may have
                    raise self._unsure(error) from error
                raise translate(error) from error

    def _unsure(self, error: Exception) -> Indeterminate:
        return Indeterminate(f"a commit to shard {self._name!r} may have happened ({error})")

    def is_ours(self, change: StateDiff, deadline: float) -> bool:
        """Whether the log entry at the diff's seqno is this very commit. Indeterminate if it cannot be read."""
        tries = 0
        while True:
            try:
                diffs = self._versions.diffs(self._name, change.seqno, 1)
                break
            except PersistError as error:
                tries += 1
                if not isinstance(error, Unavailable) or self._system.clock.monotonic() > deadline:
                    raise Indeterminate(
                        f"the outcome of a commit to shard {self._name!r} stays unread: {error}"
                    ) from error
                self.back_off(tries)
        if diffs and diffs[0].seqno == change.seqno:
            return diffs[0].commit_id == change.commit_id
        raise Indeterminate(
            f"shard {self._name!r} moved far beyond v{change.seqno} before the outcome of a commit could be read; "
            "retry with the same token"
        )

    def lost(self, lost: int, deadline: float) -> None:
        """`lost` commits in a row have lost the race: sleep before the next. Raises Unavailable after the deadline."""
        error = Unavailable(f"shard {self._name!r} is contended: {lost} commits in a row lost the race; retry")
        if self._system.clock.monotonic() > deadline:
            raise error
        self._system.sight.storms.again("committer", self._name, lost, error, self.request_id)
        self.back_off(lost, LOST_FIRST_S, LOST_MAX_S)

    def back_off(self, tries: int, first_s: float = BACKOFF_FIRST_S, most_s: float = BACKOFF_MAX_S) -> None:
        """Sleep before the next try: about twice as long after each, at most about `most_s`."""
        self._system.clock.sleep(jittered(self._system.ids, min(first_s * 2 ** min(tries, 16), most_s)))
