"""The command that writes rows which were computed from the contents of a shard, and the effects of its parts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from persist.core.attribute import AttributeUpdate
from persist.core.batch import Run
from persist.core.command import ADMIN, MAINTAIN, MANAGE, TIME_MS_MAX, WRITE, Command, WriterCommand
from persist.core.erasure import DEADLINE_MS_MAX, QUESTION_BYTES
from persist.core.frontier import Antichain
from persist.core.record import Meta, Record
from persist.core.state import SchemaRecord

INSERT = "insert"  # into a shard with unique keys
EDITS = (INSERT, "upsert", "merge_into", "delete", "update", "replace_where", "overwrite")
"""Table verbs, as the commit history names them."""
RESTORE, TRUNCATE, DROP_BEFORE, ERASE = "restore", "truncate", "drop_before", "erase"
NEVER = -2  # an `as_of` that precedes no upper: the command asks for the outcome of a token, and changes nothing


class SchemaChange(Record, frozen=True):
    """`schema` becomes current iff the current id is `expected_id`; otherwise neither rows nor columns change.

    Raises SchemaMismatch, and InvalidUsage if the shard cannot evolve to it.
    """

    expected_id: int
    schema: SchemaRecord


class NewErasure(Record, frozen=True):
    """The State records the erasure under its id, and the shard's own hold on earlier history ends.

    The earlier commit history is removed too, and with `tags` all earlier tags. `pending` is the number of pending
    erasures when the rows were computed; UpperMismatch if it differs now. `force`: at once in a shard that is fed by
    `append`.
    """

    erasure: Annotated[str, Meta(pattern="^e[0-9a-f]{32}$")]
    deadline_ms: Annotated[int, Meta(ge=1, le=DEADLINE_MS_MAX)] | None = None
    reason: str = ""
    tags: bool = False
    pending: Annotated[int, Meta(ge=0)] = 0
    force: bool = False


class PassedCut(Record, frozen=True):
    """The row policy is done with its cut of the instant `cut_ms`: this cut and earlier ones are removed.

    `overran`: it has passed a consumer.
    """

    cut_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
    overran: bool = False


class Rewrite(WriterCommand, frozen=True):
    """Write rows that were computed from the contents as of `as_of`, the time before `expected_upper`. -> Appended

    They land at the next time, iff the shard's upper is `expected_upper`; `[]` with a tombstone: at any upper. The
    other fields are parts that are present or absent; `operation` is their name in the commit history, and InvalidUsage
    if it does not match them. An empty interval: nothing changed, or it waits for the next time of a shard that is fed
    by `append`. UpperMismatch carries the actual upper. A token identifies the operation, its target and the
    `question`, whatever the resulting rows.

    - `schema`: see SchemaChange. The rows are of that schema, or of an earlier one.
    - `cut`: as for CompareAndAppend; 0: unique keys were looked up, and no truncation is pending.
    - `settings_version`: the settings have this version and a policy by a column; otherwise Conflict.
    - `undoes`: the rows restore the contents as of this time, and truncations after it are undone.
    - `truncates`: the rows retract what was written before this time. It also lands if rows were only added since
      `expected_upper`; if the shard is truncated that far already, nothing changes.
    - `tombstone`: rows before this time are dropped without retractions; `[]`: all rows. InvalidUsage if later updates
      may contain a retraction of them; NotReadable if the time before it was forgotten.
    - `erasure`: see NewErasure.
    - `passes`: see PassedCut. The cut is the time before which rows are removed.
    """

    expected_upper: Antichain
    as_of: int
    operation: Annotated[str, Meta(pattern=f"^({'|'.join((RESTORE, TRUNCATE, DROP_BEFORE, ERASE, *EDITS))})$")]
    runs: tuple[Run, ...] = ()
    question: Annotated[bytes, Meta(max_length=QUESTION_BYTES)] = b""
    attributes: tuple[AttributeUpdate, ...] = ()
    schema: SchemaChange | None = None
    cut: Annotated[int, Meta(ge=0)] | None = None
    settings_version: Annotated[int, Meta(ge=0)] | None = None
    undoes: int | None = None
    truncates: int | None = None
    tombstone: Antichain | None = None
    erasure: NewErasure | None = None
    passes: PassedCut | None = None


class Effects(Record, frozen=True):
    """The effects of a rewrite, as its parts imply.

    `as_of` is its target time, and `point` that time if the commit history names it. `scopes`: one of each group is
    needed. `removes`: it removes rows, and adds none. In a shard that is fed by `append` it is refused (`refused_fed`),
    or it `waits` for the next time. `takes_time`, `is_remembered`: also without rows.
    """

    is_consistent: bool
    as_of: int
    point: int | None
    scopes: tuple[tuple[str, ...], ...]
    removes: bool
    refused_fed: bool
    waits: bool
    takes_time: bool
    is_remembered: bool


_SCOPES: Mapping[str, tuple[str, ...]] = {
    "erasure": (ADMIN,),
    "schema": (MANAGE,),
    "settings_version": (MANAGE, MAINTAIN),
    "truncates": (WRITE, MAINTAIN),
    "before": (WRITE, MAINTAIN),
    "attributes": (WRITE,),
    "undoes": (WRITE,),
    "cut": (WRITE,),
    "clears": (WRITE,),
    "passes": (MANAGE, MAINTAIN),
}
_ROWS, _WRITTEN = frozenset({"runs"}), frozenset({"runs", "attributes"})
_MAIN: Mapping[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "undoes": ((RESTORE,), _WRITTEN),
    "truncates": ((TRUNCATE,), _ROWS | {"passes"}),
    "settings_version": ((TRUNCATE,), _ROWS),
    "before": ((DROP_BEFORE,), frozenset({"passes"})),
    "erasure": ((ERASE,), _ROWS),
    "cut": ((INSERT,), _WRITTEN),
    "": (tuple(verb for verb in EDITS if verb != INSERT), _WRITTEN | {"schema", "clears"}),
}
"""By the part that distinguishes operations: their names, and the parts that may accompany it."""
_REMOVING = frozenset({"truncates", "settings_version", "before", "erasure"})
_WAITING = frozenset({"before", "erasure"})


def effects(rewrite: Rewrite) -> Effects:
    """The effects of a rewrite. Raises nothing: `is_consistent` says whether its parts may be combined."""
    parts = _parts(rewrite)
    main = min(parts & _MAIN.keys(), default="")
    operations, beside = _MAIN[main]
    cut = rewrite.truncates if rewrite.tombstone is None else rewrite.tombstone.element
    about = rewrite.undoes if cut is None else cut - 1
    at_once = not rewrite.expected_upper.is_empty if rewrite.erasure is None else rewrite.erasure.force
    return Effects(
        is_consistent=rewrite.operation in operations and parts - {main} <= beside,
        as_of=rewrite.as_of if about is None else about,
        point=rewrite.undoes if cut is None else cut,
        scopes=tuple(dict.fromkeys(_SCOPES[part] for part in sorted(parts - _ROWS))) or ((WRITE,),),
        removes=main in _REMOVING,
        refused_fed=main not in _WAITING and main != "cut",
        waits=main in _WAITING and not at_once,
        takes_time=main in ("settings_version", "erasure"),
        is_remembered=main not in ("", "cut") or bool(rewrite.attributes),
    )


def target_of(rewrite: Rewrite) -> int | str | None:
    """The target that the commit history names: a time, or the id of an erasure; None: it has none."""
    return effects(rewrite).point if rewrite.erasure is None else rewrite.erasure.erasure


def scopes_of(command: Command) -> tuple[tuple[str, ...], ...]:
    """The scopes that a command needs: one of each group."""
    return effects(command).scopes if isinstance(command, Rewrite) else (command.scopes,)


def _parts(rewrite: Rewrite) -> frozenset[str]:
    """The names of the parts that are present. A tombstone is `before` a time, or `clears` the shard."""
    clears = rewrite.tombstone is not None and rewrite.tombstone.is_empty
    present = {
        "runs": bool(rewrite.runs),
        "attributes": bool(rewrite.attributes),
        "schema": rewrite.schema is not None,
        "cut": rewrite.cut is not None,
        "settings_version": rewrite.settings_version is not None,
        "undoes": rewrite.undoes is not None,
        "truncates": rewrite.truncates is not None,
        "before": rewrite.tombstone is not None and not clears,
        "clears": clears,
        "erasure": rewrite.erasure is not None,
        "passes": rewrite.passes is not None,
    }
    return frozenset(part for part, is_there in present.items() if is_there)
