"""The levers of a server: settings by which one cost is traded for another. `docs/levers.md` has the same table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from persist.core.errors import InvalidUsage
from persist.core.record import replace
from persist.core.state import Policy

LEVER_PREFIX = "PERSIST_LEVER_"
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Lever:
    """One of them, a whole number in `[least, most]`. `trades` says what more of it costs, and what it saves.

    `of_policy`: it is a field of the same name of `Policy`; else of `ServerSettings`.
    """

    name: str
    least: int
    most: int
    trades: str
    of_policy: bool = True


LEVERS = (
    Lever("linger_ms", 0, 1_000, "more: fewer, larger commits; every insert waits so long", of_policy=False),
    Lever("inline_part_bytes_max", 0, MIB, "more: fewer blobs; a larger log, and a larger State"),
    Lever("inline_shard_bytes_max", 0, 8 * MIB, "more: fewer merges into blobs; a larger State, which opening reads"),
    Lever("inline_batches", 4, 256, "more: fewer merges; reads look at more batches"),
    Lever("batches_max", 256, 100_000, "more: writers go on for longer without maintenance; reads get slower"),
    Lever("part_mib", 1, 1_024, "more: fewer blobs; a merge rewrites more, in more memory", of_policy=False),
    Lever("plain_parts_max", 64, 16_384, "more: fewer bundles to read; a larger State"),
    Lever("bundle_parts_max", 64, 16_384, "more: fewer bundles; each read of one takes longer"),
    Lever("rollup_every", 32, 65_536, "more: fewer rollups; opening reads so many state diffs"),
    Lever("rollup_least", 1, 1_024, "more: fewer rollups after bursts; a longer log"),
    Lever("rollup_bytes", 64 * KIB, 64 * MIB, "more: fewer rollups; opening reads so many bytes of state diffs"),
    Lever("rollup_gone", 1, 10_000, "more: fewer rollups and collections; more blobs wait to be deleted"),
    Lever("attributes_flush_at", 100, 10_000, "more: fewer writes of the index of attributes; a larger State"),
    Lever("outcomes_flush_at", 100, 10_000, "more: fewer blobs of outcomes of tokens; a larger State"),
    Lever("entries_flush_at", 16, 4_096, "more: fewer blobs of the commit history; a larger State"),
)
BY_NAME = {lever.name: lever for lever in LEVERS}


def check_levers(values: Mapping[str, int]) -> None:
    """Raises InvalidUsage naming the lever that is out of its range, or does not go with another one."""
    for name, value in values.items():
        lever = BY_NAME[name]
        if not lever.least <= value <= lever.most:
            raise InvalidUsage(f"the lever {name} is {value}; it must be in [{lever.least}, {lever.most}]")
    for name, most in (("inline_part_bytes_max", "inline_shard_bytes_max"), ("rollup_least", "rollup_every")):
        if values[name] > values[most]:
            raise InvalidUsage(f"the lever {name} is {values[name]}; it must be at most {most}, {values[most]}")


def policy_with(policy: Policy, values: Mapping[str, int]) -> Policy:
    """The policy with those of these levers that are in it."""
    return replace(policy, **{name: value for name, value in values.items() if BY_NAME[name].of_policy})
