"""Validates the parts of a command against their rows, and its schema against the shard's, before it is queued.

This runs on the caller's thread, so that a command with many parts delays no other. The result is a value, a Verdict,
which is queued with the command: a retry of a committed command is answered whatever its verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from blob import Blob, BlobError
from persist.commit.blob_tasks import check_moved
from persist.commit.validation_receipts import Receipts
from persist.core import commands as c
from persist.core.batch import Part, Run, parts_of
from persist.core.blob_keys import belongs_to
from persist.core.errors import Corruption, InvalidUsage, PersistError, SchemaMismatch
from persist.core.record import replace
from persist.core.state import SchemaRecord, State
from persist.core.transitions.context import SOUND, Verdict
from persist.core.transitions.lifecycle import reshaped
from persist.formats.store_errors import translate
from persist.parts.part_files import DecodeLimit
from persist.parts.part_validation import PartCheck, check_put
from persist.parts.read_plan import read_bundle
from persist.parts.schema_changes import (
    check_added,
    check_constrained,
    check_kept,
    check_new,
    check_policy,
    differ_in_constraints,
    frees_names,
)
from persist.parts.schema_evolution import check_first, check_next, current_schema, valid_schemas, widened_days

CHECK_THREADS = 8  # staged blobs of one command that are validated in parallel
LOOKED_AHEAD = 256  # blobs that are submitted to the pool at a time
STATS_MAX = 32  # blobs with receipts of one command whose existence is checked
AT_ONCE_BYTES_MAX = 64 * 1024  # inline bytes that are validated on the event loop
EVOLVING = (c.EvolveSchema, c.Recreate, c.SchemaChange)
BRINGING = (
    *c.WRITES_ROWS, c.MergeResult, c.HoldClaim, c.ReplacePart, c.BundleParts, c.AddRollup, *EVOLVING,
)  # fmt: skip
"""Commands that may name new parts or a rollup, or have a schema."""
OF_MAINTENANCE = (c.MergeResult, c.HoldClaim)
"""Their parts were written by persist itself: an invalid one has a damaged blob."""


class Inspector:
    """Validates parts of one shard. Thread-safe."""

    def __init__(self, blob: Blob, receipts: Receipts, bound: DecodeLimit) -> None:
        self._blob = blob
        self._receipts = receipts
        self._bound = bound
        self._checks: tuple[Mapping[int, SchemaRecord], dict[int, PartCheck]] = ({}, {})  # of the newest State

    def verdict(self, command: c.Command, state: State, by_names: bool = False) -> Verdict:
        """The verdict on what the command brings. Errors of the tree are not raised but part of the verdict.

        At most `CHECK_THREADS` blobs are read in parallel, which bounds memory. `by_names`: the rows were given by
        column name, so they are refused if their schema is not the current one.
        """
        verdict = self._validated(command, state)
        return _check_names(verdict, command, state) if by_names and not verdict.kind else verdict

    def _validated(self, command: c.Command, state: State) -> Verdict:
        parts = _brought(command, state)
        try:
            change = schema_change_of(command)
            about = SOUND if change is None else _check_schema(change, state)
            if isinstance(change, c.SchemaChange):
                state = reshaped(state, change)
            if isinstance(command, c.AddRollup):
                self._check_rollup(command, state)
            if isinstance(command, c.BundleParts) or (isinstance(command, c.ReplacePart) and command.within):
                check_moved(command, state, self._blob)
            if not parts:
                return about
            if parts[0].bundle is not None and isinstance(command, c.ReplacePart):
                read_bundle(parts[0], self._blob)
                return SOUND
            unknown, present = [], []
            for part in parts:
                is_good = self._receipts.is_good(state.shard_id, part)
                if not is_good:
                    unknown.append(part)
                elif part.key is not None:
                    present.append(part)
            self._look(unknown, state)
            if len(present) <= STATS_MAX:
                for part in present:
                    check_put(part, self._blob)
        except PersistError as error:
            is_damage = isinstance(command, OF_MAINTENANCE) and isinstance(error, InvalidUsage)
            kind = Corruption.kind if is_damage else error.kind
            return Verdict(kind, error.message, error.details, state.shard_id)
        except BlobError as error:
            translated = translate(error)
            return Verdict(translated.kind, translated.message, translated.details, state.shard_id)
        return replace(about, shard=state.shard_id)

    def receipted(self, runs: Iterable[Run], state: State) -> tuple[Run, ...]:
        """The runs with receipts, after validating all their parts. Raises the error of an invalid one."""
        held = tuple(runs)
        try:
            self._look(list(parts_of(held)), state)
        except BlobError as error:
            raise translate(error) from error
        return self._receipts.sign(state.shard_id, held)

    def _check_rollup(self, command: c.AddRollup, state: State) -> None:
        """Raise InvalidUsage unless the rollup exists. The plan checks the form of its key."""
        if belongs_to(command.key, state.shard_id) and self._blob.stat(command.key) is None:
            raise InvalidUsage(f"the rollup {command.key} of shard {state.name!r} is not there; write it again")

    def _look(self, parts: Sequence[Part], state: State) -> None:
        blobs = []
        for part in parts:
            if part.schema_id not in state.schemas or (
                part.key is not None and not belongs_to(part.key, state.shard_id)
            ):
                continue  # the plan refuses it
            check = self._check_of(part, state)
            if part.key is None:
                check.inline(part)
            else:
                blobs.append((check, part))
        if len(blobs) < 2 or CHECK_THREADS < 2:  # the simulation has no threads
            for check, part in blobs:
                check.blob(part, self._blob)
            return
        with ThreadPoolExecutor(min(CHECK_THREADS, len(blobs)), thread_name_prefix="persist-check") as pool:
            for start in range(0, len(blobs), LOOKED_AHEAD):  # the first error ends it before later blobs are read
                for _ in pool.map(lambda pair: pair[0].blob(pair[1], self._blob), blobs[start : start + LOOKED_AHEAD]):
                    pass

    def _check_of(self, part: Part, state: State) -> PartCheck:
        schemas, checks = self._checks
        if schemas is not state.schemas:
            checks = {number: PartCheck(schema, self._bound) for number, schema in valid_schemas(state.schemas).items()}
            self._checks = state.schemas, checks
        if part.schema_id not in checks:
            raise InvalidUsage(
                f"part {part.id} names schema {part.schema_id} of shard {state.name!r}, which does not fit the one "
                f"before it; write its rows by schema {max(checks)}"
            )
        return checks[part.schema_id]


def schema_change_of(command: c.Command) -> c.EvolveSchema | c.Recreate | c.SchemaChange | None:
    """The change that the command makes to the schema of the shard; None: none."""
    change = command.schema if isinstance(command, c.Rewrite) else command
    return change if isinstance(change, EVOLVING) else None


def is_at_once(command: c.Command) -> bool:
    """Whether validating the command calls no store and is so fast that it may run on the event loop."""
    if isinstance(command, c.AddRollup) or schema_change_of(command) is not None:
        return False
    parts = list(parts_of(_runs(command))) + list(getattr(command, "done", ()))
    return all(part.data is not None for part in parts) and sum(len(p.data or b"") for p in parts) <= AT_ONCE_BYTES_MAX


def _check_schema(change: c.EvolveSchema | c.Recreate | c.SchemaChange, state: State) -> Verdict:
    """The verdict on a schema. Raises InvalidUsage unless the shard can evolve to it.

    The plan checks whether it is still the next one.
    """
    if isinstance(change, c.Recreate):
        check_new(check_first(change.schema))
        return Verdict(shard=state.shard_id)
    known = {number: record for number, record in state.schemas.items() if number <= change.expected_id}
    before, after = check_next(change.schema, known or state.schemas)
    is_looked_at = isinstance(change, c.EvolveSchema) and change.expected_upper is not None
    if isinstance(change, c.EvolveSchema) and differ_in_constraints(before, after):
        check_constrained(before, after, is_verified=is_looked_at)
        return Verdict(shard=state.shard_id, constrains=True)
    if widened_days(before, after) and not is_looked_at:
        raise InvalidUsage("days become microseconds only after all rows were checked for range: use widen_column")
    check_added(before, after)
    check_kept(before, after)
    rows = state.settings.rows
    check_policy(before, after, None if rows is None else rows.column)
    version = state.settings.version if frees_names(before, after) else None
    return Verdict(shard=state.shard_id, settings=version)


def _check_names(verdict: Verdict, command: c.Command, state: State) -> Verdict:
    """The verdict on rows that were given by column name, and encoded by the schema that their parts name."""
    named = {part.schema_id for part in parts_of(_runs(command))}
    if not named:
        return verdict
    current, other = current_schema(state.schemas)[0], min(named)
    if named == {current}:
        return replace(verdict, schema=state.schema_id)
    message = (
        f"the rows use the column names of schema {other} of shard {state.name!r}, whose current schema is {current}; "
        "nothing was written: prepare the rows again by its column names"
    )
    return Verdict(SchemaMismatch.kind, message, {"expected": other, "actual": current}, state.shard_id)


def _brought(command: c.Command, state: State) -> list[Part]:
    """The parts that the command names, without those that the claim of its merge holds: they are validated already."""
    parts = list(parts_of(_runs(command)))
    if isinstance(command, OF_MAINTENANCE):
        claim = state.claims.get(command.claim_key if isinstance(command, c.MergeResult) else command.key)
        held = {part.id: part for part in claim.done} if claim is not None else {}
        parts += command.done if isinstance(command, c.HoldClaim) else ()
        parts = [part for part in parts if held.get(part.id) != part.without_receipt()]
    return parts


def _runs(command: c.Command) -> Iterable[Run]:
    if isinstance(command, c.ReplacePart):
        return () if command.replacement is None else (Run((command.replacement,)),)
    if isinstance(command, c.MergeResult):
        return command.outputs
    return command.runs if isinstance(command, c.WRITES_ROWS) else ()
