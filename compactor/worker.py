"""The compaction worker: claims due merges, executes them and applies their results.

Any number of workers share the shards of a location and coordinate only by the claims in each shard's State. A worker
may die at any instant: its claim lapses, and another worker resumes from the last saved chunk. A worker never deletes
anything: parts that it wrote in vain are garbage for GC (if the State ever named them) or orphans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from blob import BlobError, BlobNotFound
from compactor.engine import Engine, EngineSettings, LocalEngine, MergeJob
from compactor.loop import Ending, never
from compactor.metering import MaintenanceMetrics, MergeBlob
from persist.client.idempotency import send
from persist.client.transport import Transport
from persist.commit.committer import Committer, CommitterOf
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.batch import Part, Run
from persist.core.blob_keys import COMPACTOR
from persist.core.errors import Corruption, Indeterminate, PersistError, Unavailable
from persist.core.merge_plan import MergePolicy, plan
from persist.core.readable_times import kept_below
from persist.core.state import State
from persist.formats.store_errors import translate

log = logging.getLogger("persist.compactor")

CLAIM_LEASE_MS = 60_000
IDLE_MS = 10_000  # a shard without commits for so long is merged completely
RENEWED_AFTER = 3  # a claim is renewed after a third of its lease
MERGES_PER_RUN_MAX = 1_000  # of one shard, before another shard is visited
SERVER_RETRY_S = 2.0  # how long commits through a server are retried


# Called with the progress of a merge: the shard, and the bytes of inputs so far (estimated by key ranges) and in total.
ProgressReport = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How one worker merges."""

    policy: MergePolicy = field(default_factory=MergePolicy)
    engine: EngineSettings = field(default_factory=EngineSettings)


def local_engine(
    location: Location, settings: EngineSettings, metrics: MaintenanceMetrics, rate: int | None = None
) -> Engine:
    """Merges in this process. Workers that share it share `rate`, its limit in bytes per second."""
    return LocalEngine(MergeBlob(location.blob, metrics, rate, location.clock), location.ids, settings)


class MergeOutcome(Enum):
    APPLIED = "applied"
    REFUSED = "refused"  # an input or the claim is gone: another worker was faster
    BUSY = "busy"  # another worker holds the claim


class ClaimLost(Exception):
    """Another worker has taken over the claim, so further output of this worker would be in vain."""


class Worker:
    """Merges shards of a location. Not thread-safe: use one worker per thread."""

    def __init__(
        self,
        location: Location,
        settings: WorkerSettings | None = None,
        *,
        engine: Engine | None = None,
        metrics: MaintenanceMetrics | None = None,
        progress: ProgressReport | None = None,
        committer_of: CommitterOf | None = None,
    ) -> None:
        self.settings = settings or WorkerSettings()
        self.metrics = metrics or MaintenanceMetrics()
        self.owner = f"compactor-{location.ids.uuid7()}"
        self._location = location
        self._committer_of = committer_of or location.machine
        self._progress = progress
        self._engine = engine or local_engine(location, self.settings.engine, self.metrics)

    def due(self, name: str, *, idle: bool | None = None) -> list[c.MergeSpec]:
        """The merges of the shard that are due now. `idle` None: determined by the time of its last write."""
        return self._due(self._committer_of(name).refresh(), idle)

    def run(
        self, name: str, *, idle: bool | None = None, merges_max: int = MERGES_PER_RUN_MAX, ending: Ending = never
    ) -> int:
        """Merge until nothing is due. Returns the number of applied merges. Raises the errors of the stores."""
        applied = tried = 0
        machine = self._committer_of(name)
        state = machine.refresh()
        upper, was_idle = state.upper, self._is_idle(state) if idle is None else idle
        while tried < merges_max and not ending():
            self.metrics.record_size(state)
            specs = self._due(state, was_idle and state.upper == upper if idle is None else idle)
            outcomes = []
            for spec in specs:
                if ending():
                    break
                outcomes.append(self.merge(name, spec))
                tried += 1
                if outcomes[-1] is MergeOutcome.APPLIED:
                    break  # the trace has changed: plan again
            applied += outcomes.count(MergeOutcome.APPLIED)
            if MergeOutcome.APPLIED not in outcomes:
                break  # nothing is due, or other workers have the claims
            state = machine.state()
        return applied

    def merge(self, name: str, spec: c.MergeSpec) -> MergeOutcome:
        """Claim one merge, execute it, and apply its result. After an error of a store the claim lapses."""
        machine = self._committer_of(name)
        claim = _Claim(machine, spec, self.owner, self._location)
        claimed = claim.take()
        if not claimed.granted and claimed.owner != self.owner:
            self.metrics.add(claims_refused=1)
            return MergeOutcome.BUSY
        try:
            outcome = self._merge(machine, spec, claim, claimed)
        except (ClaimLost, BlobNotFound) as error:
            state = machine.refresh()
            if isinstance(error, BlobNotFound) and state.trace.covering(frozenset(spec.inputs)) is not None:
                self.metrics.add(merges_failed=1)
                raise Corruption(f"shard {name!r} names a part that is missing: {error}") from error
            outcome = MergeOutcome.REFUSED
        except BlobError as error:
            self.metrics.add(merges_failed=1)
            raise translate(error) from error
        except PersistError:
            self.metrics.add(merges_failed=1)
            raise
        if outcome is MergeOutcome.REFUSED:
            with suppress(PersistError):  # without a release, the rest of the inputs is locked until the claim lapses
                claim.release()
        self.metrics.add(**{"merges_applied" if outcome is MergeOutcome.APPLIED else "merges_refused": 1})
        log.info(
            "merge %s", outcome.value,
            extra={"shard": name, "rows": spec.rows, "bytes": spec.size, "since": str(spec.since)},
        )  # fmt: skip
        return outcome

    def idle_in_ms(self, state: State) -> int:
        """Milliseconds until the shard counts as idle if it is not written; 0 or less: it is idle.

        It is judged by the walltime of the State or, if that is ahead of this clock, by observation.
        """
        watched_ms = int(self._location.machine(state.name).unmoved_s(state) * 1000)
        return IDLE_MS - max(self._location.clock.now_ms() - state.walltime_ms, watched_ms)

    def _is_idle(self, state: State) -> bool:
        """Whether there were no commits for `IDLE_MS`. During a run this worker's own commits do not count."""
        return self.idle_in_ms(state) <= 0

    def _due(self, state: State, idle: bool | None) -> list[c.MergeSpec]:
        idle = self._is_idle(state) if idle is None else idle
        now_ms = self._location.machine(state.name).lease_now_ms(state)
        return plan(state, self.settings.policy, now_ms=now_ms, idle=idle)

    def _merge(self, machine: Committer, spec: c.MergeSpec, claim: _Claim, claimed: c.Claimed) -> MergeOutcome:
        state, inputs = machine.state(), frozenset(spec.inputs)
        covering = state.trace.covering(inputs)
        since = claimed.since if claimed.done else spec.since
        if not claimed.granted or covering is None or since.element is None:
            return MergeOutcome.REFUSED
        if claimed.done:
            self.metrics.add(merges_resumed=1)
        first, count = covering
        all_runs = [run for batch in state.trace.batches[first : first + count] for run in batch.runs]
        wanted = [Run(tuple(part for part in run.parts if part.id in inputs)) for run in all_runs]
        runs = tuple(run for run in wanted if run.parts)
        kept = kept_below(state, since)  # fixed for the merge: no kept time is ever added before since
        job = MergeJob(
            machine.name, state.shard_id, runs, state.schemas, since.element, claimed.resume_key, kept, state.drops
        )
        claim.since = since
        written = crowded = 0
        for chunk in self._engine.merge(job, claim.keep):
            written += sum(part.size for part in chunk.parts)
            crowded += chunk.crowded
            if chunk.resume_key is None:
                claim.done = (*claim.done, *chunk.parts)
                break
            if chunk.parts:
                claim.save((*claim.done, *chunk.parts), chunk.resume_key)
                self.metrics.add(chunks_saved=1)
            self._report(machine.name, job, chunk.resume_key)
        outputs = (Run(claim.done),) if claim.done else ()
        result = machine.apply(c.MergeResult(spec.inputs, outputs, since, claim.key, self.owner))
        assert isinstance(result, c.MergeApplied)
        self._report(machine.name, job, None)
        if crowded:  # logged is their number, not the keys: logs are kept, and rows may have to be erased
            self.metrics.add(crowded_keys=crowded)
            message = "unique keys have more than one row; persist schema constraints --look lists them"
            log.error(message, extra={"shard": machine.name, "keys": crowded})
        if result.applied:
            parts = (part for run in runs for part in run.parts)
            of_writers = (part for part in parts if part.key is None or f"/{COMPACTOR}/" not in part.key)
            self.metrics.count_merge(machine.name, sum(part.size for part in of_writers), written)
        return MergeOutcome.APPLIED if result.applied else MergeOutcome.REFUSED

    def _report(self, shard: str, job: MergeJob, resume_key: bytes | None) -> None:
        if self._progress is None:
            return
        done = job.size
        if resume_key is not None:
            done = sum(p.size for run in job.runs for p in run.parts if p.key_lower < resume_key)
        self._progress(shard, done, job.size)


class _Claim:
    """The claim of a merge while a worker holds it, and the progress that the State stores with it."""

    def __init__(self, machine: Committer, spec: c.MergeSpec, owner: str, location: Location) -> None:
        self.spec = spec
        self.key = spec.claim_key
        self.since = spec.since
        self.done: tuple[Part, ...] = ()
        self._resume_key = b""
        self._machine = machine
        self._owner = owner
        self._clock = location.clock
        self._renewed_s = self._clock.monotonic()

    def take(self) -> c.Claimed:
        self._renewed_s = self._clock.monotonic()
        claimed = self._hold((), b"")
        self.done, self._resume_key = claimed.done, claimed.resume_key
        return claimed

    def keep(self) -> None:
        """Renew the claim if a third of its lease has passed. Raises ClaimLost."""
        if self._clock.monotonic() - self._renewed_s >= CLAIM_LEASE_MS / 1000 / RENEWED_AFTER:
            self.save(self.done, self._resume_key)

    def save(self, done: Sequence[Part], resume_key: bytes) -> None:
        """Save the progress in the State, which also renews the claim. Raises ClaimLost."""
        now_s = self._clock.monotonic()
        try:
            saved = self._hold(tuple(done), resume_key)
        except Unavailable:
            if now_s - self._renewed_s < CLAIM_LEASE_MS / 1000 and tuple(done) == self.done:
                return  # a failed renewal is retried soon
            raise
        if not saved.granted or len(saved.done) > len(done):  # it lapsed, and another worker has saved progress
            raise ClaimLost(self.key)
        self.done, self._resume_key, self._renewed_s = tuple(done), resume_key, now_s

    def _hold(self, done: tuple[Part, ...], resume_key: bytes) -> c.Claimed:
        command = c.HoldClaim(self.key, self._owner, CLAIM_LEASE_MS, self.spec.inputs, done, resume_key, self.since)
        claimed = self._machine.apply(command)
        assert isinstance(claimed, c.Claimed)
        return claimed

    def release(self) -> None:
        self._machine.apply(c.ReleaseClaim(self.key, self._owner))


def through_server(location: Location, transport: Transport) -> CommitterOf:
    """Committers that send the commands of maintenance to a server of the same location.

    A process next to a busy writer loses most races against it, and every race that it wins makes the writer repeat its
    commit. Through the server its commands join the writers' group commit. States and blobs are still read directly
    from the stores. While the server is unavailable, maintenance commits directly.
    """
    return lambda name: _ServerCommitter(name, location, transport)


class _ServerCommitter:
    def __init__(self, name: str, location: Location, transport: Transport) -> None:
        self.name = name
        self._machine = location.machine(name)
        self._transport = transport
        self.state, self.refresh = self._machine.state, self._machine.refresh

    def apply(self, command: c.Command) -> c.Result:
        try:
            result = send(self._transport, self.name, command, SERVER_RETRY_S)
        except (Unavailable, Indeterminate):
            return self._machine.apply(command)  # an unavailable server commits nothing, so there is no race
        self._machine.refresh()
        return result
