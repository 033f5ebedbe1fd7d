"""Transitions that put parts into bundles, and take them out again. Rows, times and the order of batches stay."""

from __future__ import annotations

from collections.abc import Iterable

from persist.core import commands as c
from persist.core.batch import HollowBatch, Part, Run, batch_of, diff_sum_of
from persist.core.drops import clipped
from persist.core.errors import Corruption, InvalidUsage
from persist.core.ids import PartId, parse
from persist.core.keys import belongs_to
from persist.core.merge_plan import claimed
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions.context import Context
from persist.core.transitions.dropping import brings_back


def bundle_parts(state: State, command: c.BundleParts, context: Context) -> tuple[State, c.Bundled]:
    """A merge under way names its inputs by id, so what one is at work on stays as it is.

    A bundle that was written before a drop was forgotten has rows that the parts have lost since.
    """
    inputs, bundles = frozenset(command.inputs), [part for run in command.outputs for part in run.parts]
    found = state.trace.covering(inputs) if inputs else None
    if found is None or found[1] != 1:
        return state, c.Bundled(False)
    if not inputs.isdisjoint(claimed(state, context.lease_now_ms)) or _are_swept(state, bundles, context):
        return state, c.Bundled(False)
    if brings_back(state, command.outputs):
        return state, c.Bundled(False)
    context.verdict.check()
    batch = state.trace.batches[found[0]]
    taken = [part for part in batch.parts() if part.id in inputs]
    for part in bundles:
        check_bundle(state, part)
    _check_same(state, taken, bundles)
    if sum(part.bundle.parts for part in bundles if part.bundle is not None) != len(taken):
        raise InvalidUsage(f"bundles of shard {state.name!r} do not list the parts in whose place they stand")
    kept = [Run(tuple(part for part in run.parts if part.id not in inputs)) for run in batch.runs]
    runs = (*(run for run in kept if run.parts), *command.outputs)
    return _with_batch(state, found[0], HollowBatch(batch.desc, runs, batch.rows)), c.Bundled(True)


def unbundled(state: State, bundle_id: str, listed: tuple[Run, ...]) -> State:
    """The State with what a bundle lists in its place; the State itself where it has no such bundle."""
    found = state.trace.covering(frozenset({bundle_id}))
    if found is None:
        return state
    batch = state.trace.batches[found[0]]
    runs: list[Run] = []
    for run in batch.runs:
        at = next((index for index, part in enumerate(run.parts) if part.id == bundle_id), None)
        if at is None:
            runs.append(run)
            continue
        inner = [part for each in listed for part in each.parts]
        _check_same(state, [run.parts[at]], inner)
        shown = clipped(listed, run.parts[at].clip or 0)  # a drop has taken away what lies before
        if len(run.parts) == 1:
            runs.extend(shown)
        else:  # bundles of one long run
            inner = [part for each in shown for part in each.parts]
            runs.append(Run((*run.parts[:at], *inner, *run.parts[at + 1 :])))
    return _with_batch(state, found[0], batch_of(batch.desc, tuple(run for run in runs if run.parts)))


def _with_batch(state: State, index: int, batch: HollowBatch) -> State:
    return replace(state, trace=state.trace.splice(index, 1, [batch]))


def _are_swept(state: State, bundles: Iterable[Part], context: Context) -> bool:
    """Whether one of them may have been swept. What is no key at all is refused later, so it has no age."""
    keys = (part.key for part in bundles if part.key is not None and belongs_to(part.key, state.shard_id))
    return any(context.may_be_swept(state, key) for key in keys)


def check_bundle(state: State, part: Part) -> None:
    """Refuse what is no bundle of the shard, or one that it names already."""
    parse(PartId, part.id)
    key = part.key or ""
    is_bundle = part.bundle is not None and part.data is None
    if not is_bundle or not belongs_to(key, state.shard_id) or not key.endswith(f"/{part.id}.bundle"):
        raise InvalidUsage(f"part {part.id} is no bundle of shard {state.name!r}")
    if state.trace.holds(part.id):
        raise InvalidUsage(f"bundle {part.id} is in shard {state.name!r} already")


def _check_same(state: State, before: list[Part], after: list[Part]) -> None:
    """The two stand for the same rows, as far as the State can tell."""
    sums = [(sum(p.rows for p in parts), sum(p.size for p in parts)) for parts in (before, after)]
    diffs = [diff_sum_of(parts) for parts in (before, after)]
    if sums[0] != sums[1] or (None not in diffs and diffs[0] != diffs[1]):
        raise Corruption(f"a bundle of shard {state.name!r} stands for other rows than the parts that it lists")
