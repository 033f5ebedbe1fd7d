"""The native read: the same rows as `format("persist")`, through Spark's own vectorised Parquet reader.

It is chosen by itself where all rows lie in files that need no merging and that Spark reaches; otherwise the rows come
by `format("persist")`. `native_choice` says when, `native_plan` makes the frames, `native_holds` holds their files.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from persist.client.complete import BEFORE_ALL
from persist.client.lease import ReadSettings
from persist.client.snapshot import Held, Tagged, holding, leased_blobs
from persist.client.transport import Transport
from persist.core.batch import Part
from persist.core.errors import InvalidUsage
from persist.core.tags import check_tag_name
from persist.parts import current_schema, sound_schemas
from persist.parts.files import Files
from persist.parts.stretches import classify
from persist.spark import executors
from persist.spark import native_choice as choice
from persist.spark.native_holds import file_lists, holds
from persist.spark.native_plan import NativePlan
from persist.spark.options import WAIT_S, Options, Target
from persist.spark.saving import FORMAT
from persist.spark.schemas import spark_schema

log = logging.getLogger("persist.spark")
HOLD_S = ReadSettings().lease_ms / 1000
HOLD_S_MAX = 86_400.0


def table(  # noqa: PLR0913 - what is read, and how, each by its name
    spark: SparkSession,
    shard: str,
    *,
    as_of: int | None = None,
    tag: str | None = None,
    native: str = choice.AUTO,
    hold_s: float = HOLD_S,
    root: str | None = None,
    **options: str,
) -> DataFrame:
    """The contents of a shard as of a time (None: the latest complete one) or a tag, each row as often as it occurs.

    Args:
        spark: the session.
        shard: its name.
        as_of: the time, which is fixed now.
        tag: the name of a tag, in the place of a time.
        native: "auto" is Spark's own Parquet reader where that gives exactly these rows, else `format("persist")`;
            "always" is Spark's own or an error; "never" is `format("persist")`.
        hold_s: for how many seconds, in (0, 86400], a lease on the files is. It is renewed while a DataFrame reads
            them, and lapses when the last one is gone, or this process ends. Spark fails on a missing file; it never
            leaves rows out.
        root: the URL by which executors reach the blob store, where it is not the one that this process uses.
        options: those of `format("persist")` that say where shards are (`url="persist:///dir"`), and those of a
            `ShardTable`.
    Raises: InvalidUsage (with "always": the store has no path, or Spark reads or groups some column otherwise),
        NotReadable, Unavailable, UnknownShard.
    """
    if as_of is not None and tag is not None:
        raise InvalidUsage("as_of and tag are both given; give one of them")
    if not 0 < hold_s <= HOLD_S_MAX:
        raise InvalidUsage(f"hold_s is {hold_s!r}; it must be in (0, {HOLD_S_MAX:g}]")
    choice.checked_choice(native)
    at = as_of if tag is None else Tagged(check_tag_name(tag))
    given = Options({**options, "path": shard})
    given.check("a table")
    named = Target.of(given)
    executors.check_there(named)
    target = named.at(writes=False)
    settings = replace(target.connection.handles.read, lease_ms=int(hold_s * 1000))
    transport = executors.transport(target.connection)
    view = executors.view_of(target)
    if at is None and view.upper.element == 0:
        return spark.createDataFrame([], spark_schema(current_schema(view.schemas)[1].arrow))
    with holding(transport, target.shard, at, "spark native read", WAIT_S, settings) as held:
        found = NativeRead(spark, transport, held, given).frame(native, root)
        if found is not None:
            return found
        reader = spark.read.format(FORMAT).options(**{**options, "asOf": str(held.as_of)})
        return reader.load(shard)


class NativeRead:
    """A time of a shard that is held, as Spark's own reader would read it."""

    def __init__(self, spark: SparkSession, transport: Transport, held: Held, options: Options) -> None:
        self._spark: Any = spark
        self._transport = transport
        self._held = held
        self._options = options
        self._schemas = sound_schemas(held.view.schemas)
        self._schema = self._schemas[max(self._schemas)]

    def frame(self, native: str, root: str | None = None) -> DataFrame | None:
        """The DataFrame, with its files held for as long as it is there; None: read it by `format("persist")`.

        Raises InvalidUsage where `native` is "always" and Spark does not read it, and what reading footers may.
        """
        if native == choice.NEVER:
            return None
        why_not = self._why_not_before(root) if native == choice.AUTO else None
        parts = [part for run in self._held.runs for part in run.parts]
        if native == choice.ALWAYS:
            refused = choice.why_not_sources(self._spark) or choice.why_not_schema(self._schema)
            refused = refused or choice.why_not_life(self._schemas, parts)
            if refused is not None:
                raise InvalidUsage(f"{refused}; use format('persist')")
        if why_not is None:
            below, as_of = root or choice.root_of(str(self._transport.blob.url)), self._held.as_of
            with leased_blobs(self._held.lease):
                straight, others = classify(self._held.runs, as_of, Files(self._transport.blob, self._schemas))
            why_not = self._why_not_these(straight, others, below) if native == choice.AUTO else None
            if why_not is None:
                found = NativePlan(self._spark, self._schema, below).frame(as_of, straight, others, self._schemas)
                if choice.has_jvm(self._spark):
                    lease_s = self._held.settings.lease_ms / 1000
                    holds().keep(self._held.lease, lease_s, file_lists(self._spark, found))
                return found
        log.info("persist: shard %r is read by format('persist'): %s", self._held.view.name, why_not)
        return None

    def _why_not_before(self, root: str | None) -> str | None:
        """What can be told before any file is looked at."""
        transport, held = self._transport, self._held
        why_not = choice.why_not_session(self._spark, self._options, shows_copy=transport.shows_copy)
        why_not = why_not or choice.why_not_sources(self._spark) or choice.why_not_schema(self._schema)
        if why_not is not None:
            return why_not
        if held.as_of == BEFORE_ALL:
            return "nothing was written by then"
        if holds().is_full:
            return "too many native reads are held"
        try:
            below = root or choice.root_of(str(transport.blob.url))
        except InvalidUsage as error:
            return error.message
        parts = [part for run in held.runs for part in run.parts]
        why_not = choice.why_not_life(self._schemas, parts)
        if why_not is not None:
            return why_not
        return choice.why_not_root(self._spark, below, is_given=root is not None) or choice.why_not_parts(
            parts, held.as_of
        )

    def _why_not_these(self, straight: Sequence[Part], others: Sequence[Part], below: str) -> str | None:
        """What the files tell."""
        if others:
            return "some files have rows in common"
        why_not = choice.why_not_parts(straight, self._held.as_of)
        if why_not is None and straight:
            why_not = choice.why_not_reached(self._spark, below, straight[0])
        return why_not
