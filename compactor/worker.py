"""The compaction worker: claims due merges, does them, applies their results.

Any number of workers share the shards of a location; they only meet in the claims that a shard's State holds. A worker
may die at any instant: its claim lapses, another takes over and goes on from the last chunk that was saved. A worker
never deletes anything: parts that it wrote in vain are garbage for GC (if the State ever named them) or orphans.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from blob import BlobError, BlobNotFound
from compactor.engine import Engine, EngineSettings, LocalEngine, MergeJob
from compactor.loop import Ending, never
from compactor.metering import MaintenanceMetrics, MeteredBlobs
from persist.commit.location import Location
from persist.commit.machine import Committer, CommitterOf
from persist.copies.throttled_blob import Throttle
from persist.core import commands as c
from persist.core.batch import HollowBatch, Part, Run
from persist.core.blob_keys import COMPACTOR
from persist.core.errors import Corruption, PersistError, Unavailable
from persist.core.merge_plan import MergePolicy, plan
from persist.core.state import State, kept_below
from persist.formats.store_errors import translate

log = logging.getLogger("persist.compactor")

RENEWED_AFTER = 3  # a claim is renewed when a third of its lease has passed
MERGES_PER_RUN_MAX = 1_000  # of one shard, before another shard has its turn


class ProgressReport(Protocol):
    """Hears how far a merge is: of `total` input bytes `done` (estimated by key ranges)."""

    def __call__(self, shard: str, done: int, total: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """`idle_ms`: a shard that was not written for so long is brought to its least size."""

    policy: MergePolicy = field(default_factory=MergePolicy)
    engine: EngineSettings = field(default_factory=EngineSettings)
    lease_ms: int = 60_000
    idle_ms: int = 10_000


def local_engine(
    location: Location, settings: EngineSettings, metrics: MaintenanceMetrics, rate: int | None = None
) -> Engine:
    """Merges in this process. Workers that share it share its limit of bytes a second, `rate`."""
    blobs = MeteredBlobs(location.blob, metrics, Throttle(rate, location.clock))
    return LocalEngine(blobs, location.ids, settings)


class MergeOutcome(Enum):
    APPLIED = "applied"
    REFUSED = "refused"  # an input or the claim is gone: another was faster
    BUSY = "busy"  # another holds the claim


class ClaimLost(Exception):
    """Another has taken the claim over: whatever this worker goes on to write would be in vain."""


class Worker:
    """Merges shards of a location. One thread at a time per worker; open several for more."""

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
        """The merges that are due on the shard now. `idle` None: by when it was last written."""
        return self._due(self._committer_of(name).refresh(), idle)

    def run(
        self,
        name: str,
        *,
        idle: bool | None = None,
        merges_max: int = MERGES_PER_RUN_MAX,
        ending: Ending = never,
    ) -> int:
        """Do merges on the shard until none is due; how many were applied. Raises what the stores raise."""
        applied = tried = 0
        machine = self._committer_of(name)
        state = machine.refresh()
        upper, was_idle = state.upper, self._is_idle(state) if idle is None else idle
        while tried < merges_max and not ending():
            self.metrics.seen(state)
            specs = self._due(state, was_idle and state.upper == upper if idle is None else idle)
            outcomes = []
            for spec in specs:
                if ending():
                    break
                outcomes.append(self.merge(name, spec))
                tried += 1
                if outcomes[-1] is MergeOutcome.APPLIED:
                    break  # the trace has changed: what is due may be something better now
            applied += outcomes.count(MergeOutcome.APPLIED)
            if MergeOutcome.APPLIED not in outcomes:
                break  # nothing is due, or others are at it
            state = machine.state()
        return applied

    def merge(self, name: str, spec: c.MergeSpec) -> MergeOutcome:
        """Claim one merge, do it, and apply its result. Errors of the stores leave the claim to lapse."""
        machine = self._committer_of(name)
        claim = _Claim(machine, spec, self.owner, self.settings.lease_ms, self._location)
        taken = claim.take()
        if not taken.granted and taken.owner != self.owner:
            self.metrics.add(claims_refused=1)
            return MergeOutcome.BUSY
        try:
            outcome = self._merge(machine, spec, claim, taken)
        except (ClaimLost, BlobNotFound) as error:
            outcome = self._lost(machine, claim, error)
        except BlobError as error:
            self.metrics.add(merges_failed=1)
            raise translate(error) from error
        except PersistError:
            self.metrics.add(merges_failed=1)
            raise
        if outcome is MergeOutcome.REFUSED:
            with suppress(PersistError):  # else it lapses; until then nobody could merge what is left of its inputs
                claim.release()
        self.metrics.add(**{"merges_applied" if outcome is MergeOutcome.APPLIED else "merges_refused": 1})
        log.info(
            "merge %s", outcome.value,
            extra={"shard": name, "rows": spec.rows, "bytes": spec.size, "since": str(spec.since)},
        )  # fmt: skip
        return outcome

    def _is_idle(self, state: State) -> bool:
        """Whether nobody has committed for a while. This worker's own commits do not end that while a run lasts.

        By the walltime of the State, or by watching, where the clock of its committer was ahead.
        """
        return idle_for_ms(self._location, state) >= self.settings.idle_ms

    def _due(self, state: State, idle: bool | None) -> list[c.MergeSpec]:
        idle = self._is_idle(state) if idle is None else idle
        now_ms = self._location.machine(state.name).lease_now_ms(state)
        return plan(state, self.settings.policy, now_ms=now_ms, idle=idle)

    def _merge(self, machine: Committer, spec: c.MergeSpec, claim: _Claim, taken: c.Claimed) -> MergeOutcome:
        state = machine.state()
        found = state.trace.covering(frozenset(spec.inputs))
        since = taken.since if taken.done else spec.since
        if not taken.granted or found is None or since.element is None:
            return MergeOutcome.REFUSED
        if taken.done:
            self.metrics.add(merges_resumed=1)
        runs = _runs_of(state.trace.batches[found[0] : found[0] + found[1]], spec.inputs)
        kept = kept_below(state, since)  # whatever was kept when the merge began: before since none is ever added
        job = MergeJob(
            machine.name, state.shard_id, runs, state.schemas, since.element, taken.resume_key, kept, state.drops
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
        if crowded:
            self._tell_crowded(machine.name, crowded)
        if result.applied:
            self.metrics.merged(machine.name, sum(p.size for run in runs for p in run.parts if _is_new(p)), written)
        return MergeOutcome.APPLIED if result.applied else MergeOutcome.REFUSED

    def _tell_crowded(self, name: str, keys: int) -> None:
        """No keys: logs are kept, and rows may have to be erased."""
        self.metrics.add(crowded_keys=keys)
        log.error(
            "keys that are to be unique have more than one row; persist schema constraints --look tells them",
            extra={"shard": name, "keys": keys},
        )

    def _lost(self, machine: Committer, claim: _Claim, error: Exception) -> MergeOutcome:
        """An input is gone, or the claim. If every input is still named, a blob that must be there is missing."""
        state = machine.refresh()
        if isinstance(error, BlobNotFound) and state.trace.covering(frozenset(claim.spec.inputs)) is not None:
            self.metrics.add(merges_failed=1)
            raise Corruption(f"shard {machine.name!r} names a part that is missing: {error}") from error
        return MergeOutcome.REFUSED

    def _report(self, shard: str, job: MergeJob, resume_key: bytes | None) -> None:
        if self._progress is None:
            return
        done = job.size
        if resume_key is not None:
            done = sum(p.size for run in job.runs for p in run.parts if p.key_lower < resume_key)
        self._progress(shard, done, job.size)


class _Claim:
    """One merge's claim while a worker holds it, and what the State keeps with it."""

    def __init__(self, machine: Committer, spec: c.MergeSpec, owner: str, lease_ms: int, location: Location) -> None:
        self.spec = spec
        self.key = spec.claim_key
        self.since = spec.since
        self.done: tuple[Part, ...] = ()
        self._resume_key = b""
        self._machine = machine
        self._owner = owner
        self._lease_ms = lease_ms
        self._clock = location.clock
        self._renewed_s = self._clock.monotonic()

    def take(self) -> c.Claimed:
        self._renewed_s = self._clock.monotonic()
        taken = self._hold((), b"")
        self.done, self._resume_key = taken.done, taken.resume_key
        return taken

    def keep(self) -> None:
        """Renew the claim when a good part of its lease has passed. Raises ClaimLost."""
        if self._clock.monotonic() - self._renewed_s >= self._lease_ms / 1000 / RENEWED_AFTER:
            self.save(self.done, self._resume_key)

    def save(self, done: Sequence[Part], resume_key: bytes) -> None:
        """Keep what was written so far in the State, which also renews the claim. Raises ClaimLost."""
        now_s = self._clock.monotonic()
        try:
            saved = self._hold(tuple(done), resume_key)
        except Unavailable:
            if now_s - self._renewed_s < self._lease_ms / 1000 and tuple(done) == self.done:
                return  # a renewal that did not happen is tried again soon
            raise
        if not saved.granted or len(saved.done) > len(done):  # it lapsed, and another has written for it since
            raise ClaimLost(self.key)
        self.done, self._resume_key, self._renewed_s = tuple(done), resume_key, now_s

    def _hold(self, done: tuple[Part, ...], resume_key: bytes) -> c.Claimed:
        command = c.HoldClaim(self.key, self._owner, self._lease_ms, self.spec.inputs, done, resume_key, self.since)
        held = self._machine.apply(command)
        assert isinstance(held, c.Claimed)
        return held

    def release(self) -> None:
        self._machine.apply(c.ReleaseClaim(self.key, self._owner))


def _runs_of(batches: Sequence[HollowBatch], inputs: Sequence[str]) -> tuple[Run, ...]:
    wanted = frozenset(inputs)
    runs = [Run(tuple(part for part in run.parts if part.id in wanted)) for batch in batches for run in batch.runs]
    return tuple(run for run in runs if run.parts)


def idle_for_ms(location: Location, state: State) -> int:
    """For how long nobody has committed."""
    watched_ms = int(location.machine(state.name).unmoved_s(state) * 1000)
    return max(location.clock.now_ms() - state.walltime_ms, watched_ms)


def _is_new(part: Part) -> bool:
    """Whether a writer wrote it, not a merge."""
    return part.key is None or f"/{COMPACTOR}/" not in part.key
