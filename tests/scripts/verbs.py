"""The verbs of scripts that drive `step`: one per command, and a few that look at the State or move the clock.

Ids are a letter and a number (`w1`, `r2`, `c1`, `p7`, `i3`). A frontier is `[7]`, or `[]` for closed. A run is its
parts joined by commas, a part is `p1:<rows>@<time>[-<last time>][~<inline bytes>][+<sum of diffs>][%<schema>]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from persist.core import commands as c
from persist.core import state as states
from persist.core.attribute import BYTE_COUNT, EVENT_COUNT, AttributeKey, AttributeUpdate, IndexRoot
from persist.core.audit_log import born_ms
from persist.core.batch import Description, HollowBatch, Part, Run, trace_of
from persist.core.clock_index import MARKS_PAGE_MAX, Mark
from persist.core.erasure import Doomed, Erasure, Proof, Wait
from persist.core.errors import InvalidUsage, PersistError
from persist.core.frontier import EMPTY, MINIMUM, Antichain
from persist.core.ids import (
    CriticalReaderId,
    LoanId,
    PartId,
    ReaderId,
    SeqNo,
    Token,
    WriterId,
    parse,
    shard_id_of,
    writer_of,
)
from persist.core.named_holds import Tag
from persist.core.record import asdict, replace
from persist.core.shard_phases import phase_of
from persist.core.shard_settings import NO_RETENTION, NOT_LOOKED, RETRACT, Ladder, Looked, RowPolicy, Rung
from persist.core.spill import OUTCOMES, SpillFile
from persist.core.state import Policy, SchemaRecord, State, initial_state
from persist.core.transitions import (
    attribute_updates,
    lifecycle,
    outcomes_and_audit,
    reader_holds,
    wall_clocks,
    writers,
)
from tests.scripts.harness import Arguments, ScriptError, print_error
from tests.support.shard import NAME, SCHEMA, Shard, make_part, numbered

_ATTRIBUTE = re.compile(r"\baa(\d{30})\b")
_ID = re.compile(r"\b([swrcpil])([0-9a-f]{32})\b")
_PART = re.compile(r"p(\d+):(\d+)@(\d+)(?:-(\d+))?(?:~(\d+))?(?:\+(-?\d+))?(?:%(\d+))?")
LEASE_MS = 1000
# verbs that commit nothing


# --- reading


def parse_id(kind: Any, word: str) -> Any:
    if not re.fullmatch(r"[a-z]\d{1,31}", word):
        raise ScriptError(f"{word} is no id; write w1")
    try:
        return parse(kind, numbered(word[0], int(word[1:])))
    except InvalidUsage as error:
        raise ScriptError(f"{word} is no {kind.__name__}: {error}") from error


def parse_frontier(word: str) -> Antichain:
    return Antichain.from_json(json.loads(word))


def parse_part(word: str) -> Part:
    found = _PART.fullmatch(word)
    if not found:
        raise ScriptError(f"{word} is no part; write p1:3@5-9~100+3%1")
    number, rows, first, last, inline, total, schema = (None if g is None else int(g) for g in found.groups())
    assert number is not None
    assert rows is not None
    assert first is not None
    return make_part(
        number,
        rows=rows,
        times=(first, first if last is None else last),
        inline=inline,
        diff_sum=total,
        schema_id=schema or 1,
    )


def parse_runs(words: list[str]) -> tuple[Run, ...]:
    return tuple(Run(tuple(parse_part(part) for part in word.split(","))) for word in words)


def parse_part_ids(text: str) -> tuple[str, ...]:
    return tuple(parse_id(PartId, word) for word in text.split(",") if word)


def _optional_seqno(text: str | None) -> SeqNo | None:
    return None if text is None else SeqNo(int(text.removeprefix("v")))


def _hold(args: Arguments) -> SeqNo | None:
    return _optional_seqno(args.optional("registered"))


def rollup_name(seqno: SeqNo, number: str) -> str:
    return f"{shard_id_of(NAME)}/v{int(seqno):020d}/r{number.zfill(32)}.rollup"


def _loan(args: Arguments) -> LoanId:
    return parse_id(LoanId, args.next("a loan"))  # type: ignore[no-any-return]


def list_name(number: str) -> str:
    """The key of a list of this shard's, `7`, or of another shard's, `7/other`."""
    digits, _, shard = number.partition("/")
    return f"{shard_id_of(shard or NAME)}/l/x{digits.zfill(32)}.loan"


def _list(args: Arguments) -> str:
    return list_name(args.named("list"))


def _begin_clone(args: Arguments) -> c.Command:
    """A clone of a shard of one part, with the loan that is named, if one is: `begin-clone of=other loan=l1 list=1`."""
    source, born = args.named("of"), initial_state(NAME, SCHEMA, 0)
    part = make_part(args.number("part", 77), shard=source)
    batch = HollowBatch(Description(MINIMUM, Antichain(5), MINIMUM), (Run((part,)),), part.rows)
    loan = args.optional("loan")
    borrowed = {} if loan is None else {LoanId(parse_id(LoanId, loan)): source}
    born = replace(born, trace=trace_of([batch]), borrowed=borrowed)
    lists = () if loan is None else (list_name(f"{args.named('list')}/{source}"),)
    return c.BeginClone(born, lists, shard=shard_id_of(NAME, args.number("from", 0)))


# --- printing


def short(text: str) -> str:
    """The text with ids as scripts write them."""
    text = _ATTRIBUTE.sub(lambda m: "a" + (m[1].lstrip("0") or "0"), text)
    return _ID.sub(lambda m: show_id(m[1], m[2]), text)


def show_id(letter: str, digits: str) -> str:
    """An id as scripts write it. Tokens have a number, and perhaps a birth."""
    if not digits.isdigit():
        return letter + "*"
    if letter != "i":
        return letter + (digits.lstrip("0") or "0")
    born = born_ms(digits)
    return f"i{int(digits[1:])}" if born is None else f"i{int(digits[13:])}@{born}"


def show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, bytes):
        return value.decode() or "-"
    if isinstance(value, Part):
        return show_part(value)
    if isinstance(value, Mark):
        return f"{value.at_ms}:{value.upper}"
    if isinstance(value, Mapping):
        return ",".join(f"{show_key(key)}={'-' if v is None else v}" for key, v in value.items()) or "-"
    if isinstance(value, Tag):
        return str(value.time) if value.until_ms is None else f"{value.time}<{value.until_ms}"
    if isinstance(value, tuple):
        return ",".join(show(item) for item in value) or "-"
    return short(str(value)) or "-"


def show_key(key: str) -> str:
    """An attribute's key as scripts write it."""
    if key in (EVENT_COUNT, BYTE_COUNT):
        return "events" if key == EVENT_COUNT else "bytes"
    return "a" + (key[2:].lstrip("0") or "0")


def show_part(part: Part) -> str:
    if part.time is not None:
        times = f"={part.time}"
    else:
        times = f"@{part.time_min}" if part.time_min == part.time_max else f"@{part.time_min}-{part.time_max}"
    inline = "" if part.data is None else f"~{len(part.data)}"
    clip = "" if part.clip is None else f" clip={part.clip}"
    return f"{short(part.id)}:{part.rows}{times}{inline}{clip}"


def show_result(result: c.Result | PersistError) -> str:
    if isinstance(result, PersistError):
        return short(print_error(result))
    if isinstance(result, c.TagsAre):
        return " ".join(["tags-are", *(f"{name}={show(tag)}" for name, tag in sorted(result.tags.items()))])
    if isinstance(result, c.ErasuresAre):
        return "\n".join(["erasures-are", *(show_erasure(*found, result.waits) for found in result.erasures.items())])
    name = re.sub(r"(?<!^)(?=[A-Z])", "-", type(result).__name__).lower()
    fields = {key: value for key, value in asdict(result).items() if key != "following" or value is not None}
    return " ".join([name, *(show_field(*field) for field in fields.items())])


def show_erasure(name: str, found: Erasure, waits: Mapping[str, tuple[Wait, ...]]) -> str:
    """An erasure by its number, and for what it waits."""
    told = [f"erasure {name.lstrip('e0')} {found.phase} at={found.at}"]
    if found.deadline_ms is not None:
        told.append(f"deadline={found.deadline_ms}")
    if found.rewritten:
        told.append(f"rewritten=v{found.rewritten} doomed={found.doomed.blobs}")
    if found.proof is not None:
        told.append(f"horizon=v{found.proof.horizon}")
    told += [f"{wait.kind}:{wait.name}:{wait.time}" for wait in waits.get(name, ())]
    return " ".join(told)


def show_field(name: str, value: Any) -> str:
    return f"{name}=v{value}" if name == "seqno" else f"{name}={show(value)}"


def show_batch(batch: HollowBatch) -> str:
    runs = " ".join(",".join(show_part(part) for part in run.parts) for run in batch.runs)
    kept = f" kept={','.join(map(str, batch.desc.kept))}" if batch.desc.kept else ""
    return f"batch {batch.desc} rows={batch.rows}{kept} {runs}".rstrip()


def show_state(state: State) -> list[str]:
    lines = [f"v{state.seqno} since={state.since} upper={state.upper}" + (" tombstone" if state.tombstone else "")]
    lines += [show_batch(batch) for batch in state.trace.batches]
    kinds: tuple[tuple[str, Mapping[Any, Any]], ...] = (
        ("writer", state.writers),
        ("reader", state.leased_readers),
        ("critical", state.critical_readers),
        ("tag", state.tags),
        ("cut", {str(at_ms): cut for at_ms, cut in state.cuts.items()}),
        ("rollup", {f"v{seqno}": rollup for seqno, rollup in state.rollups.items()}),
        ("claim", state.claims),
        ("outcome", {show_id("i", key): outcome for key, outcome in state.outcomes.items()}),
    )
    for kind, entries in kinds:
        lines += [f"{kind} {short(str(k))} {_fields(entries[k])}" for k in sorted(entries)]
    lines += [
        f"outcome-file {int(file.key[-38:-6])} count={file.count} kept={file.begun_ms}-{file.until_ms} "
        f"born={file.first}-{file.last}"
        for file in state.files_of(OUTCOMES)
    ]
    if state.forgotten_ms:
        lines.append(f"forgotten {state.forgotten_ms}")
    lines += [f"truncated {_fields(one)}" for one in state.truncations]
    lines += [f"drop {_fields(drop)}" for drop in state.drops]
    lines += [f"floor {state.floor}"] if state.floor else []
    if state.retention != NO_RETENTION:
        lines.append(f"retention {_fields(replace(state.retention, looked=None))}")
    if state.retention.looked != NOT_LOOKED:
        lines.append(f"looked {_fields(state.retention.looked)}")
    lines += [f"loan {short(key)} {_fields(loan)}" for key, loan in sorted(state.loans.items())]
    lines += [f"borrowed {short(key)} of {owner}" for key, owner in sorted(state.borrowed.items())]
    lines += [show_erasure(key, state.erasures[key], {}) for key in sorted(state.erasures)]
    if state.settings.version:
        lines.append(f"settings {_fields(state.settings)} hold={state.history_hold}")
    if state.seal.sealed_ms:
        marks = {**state.marks, **({state.seal.last.at_ms: state.seal.last.upper} if state.seal.last else {})}
        lines.append(f"sealed {state.seal.sealed_ms} marks " + " ".join(f"{at}:{marks[at]}" for at in sorted(marks)))
        if state.seal.passed is not None:
            lines.append(f"unchecked since {state.seal.passed}")
        lines += [f"repaired from {before} to {to}" for to, before in state.seal.repairs]
    if state.attributes:
        lines.append("attributes " + show({key: state.attributes[key] for key in sorted(state.attributes)}))
    return lines


def _fields(record: Any) -> str:
    shown = [(name, value) for name, value in asdict(record).items() if value is not False]
    return " ".join(show_field(*field) for field in shown if field[1] not in (None, "", (), b""))


# --- commands


def _row_policy(args: Arguments) -> RowPolicy | None:
    """`age=`, `rows=` and `column=` with `column-age=`, `cut-every=`, `consumer=` and `consumers-max-age=`.

    None where no limit is given.
    """
    age_ms, rows_max = (_optional_number(args.optional(name)) for name in ("age", "rows"))
    every_ms, consumer = args.number("cut-every", 1000), args.named("consumer", "")
    max_age_ms = _optional_number(args.optional("consumers-max-age"))
    column, column_age_ms = args.optional("column"), _optional_number(args.optional("column-age"))
    if age_ms is None and rows_max is None and column is None:
        return None
    consumers = (consumer,) if consumer else ()
    return RowPolicy(
        age_ms,
        None,
        rows_max,
        every_ms,
        consumers,
        max_age_ms,
        Ladder(hourly=args.number("hourly", 0)),
        column=column,
        column_age_ms=column_age_ms,
        mode=args.named("mode", RETRACT),
    )


def _looked(args: Arguments) -> Looked:
    """`version=`, `upper=`, `at=`, `removed=`, `next=`, `held=`."""
    return Looked(
        args.number("version", 0),
        args.number("upper", 0),
        args.number("at", 0),
        args.number("removed", 0),
        _optional_number(args.optional("next")),
        _optional_number(args.optional("held")),
    )


def _merge(args: Arguments) -> c.MergeResult:
    inputs = parse_part_ids(args.named("inputs"))
    since, claim = parse_frontier(args.named("since")), args.named("claim", "")
    owner = args.named("owner", "")
    return c.MergeResult(inputs, parse_runs(args.rest()), since, claim, owner)


def _hold_claim(args: Arguments) -> c.HoldClaim:
    return c.HoldClaim(
        args.next("a claim"),
        args.next("an owner"),
        args.number("lease", LEASE_MS),
        parse_part_ids(args.named("inputs")),
        tuple(parse_part(word) for word in args.rest()),
        args.named("resume", "").encode(),
        parse_frontier(args.named("since", "[0]")),
    )


def _add_rollup(args: Arguments) -> c.AddRollup:
    seqno = SeqNo(int(args.next("a seqno").removeprefix("v")))
    of = SeqNo(int(args.named("of", str(seqno)).removeprefix("v")))  # whose key it has
    return c.AddRollup(seqno, rollup_name(of, args.next("a number")), args.number("size", 100))


def _optional_frontier(word: str | None) -> Antichain | None:
    return None if word is None else parse_frontier(word)


def _writer(args: Arguments) -> WriterId:
    return parse_id(WriterId, args.next("a writer"))


def _reader(args: Arguments) -> ReaderId:
    return parse_id(ReaderId, args.next("a reader"))


def _critical(args: Arguments) -> CriticalReaderId:
    return parse_id(CriticalReaderId, args.next("a critical reader"))


def parse_token(word: str) -> Token:
    """`i1`, a free-form one, or `i1@700`, minted at 700 ms."""
    number, _, born = word.partition("@")
    return Token(f"i{int(born):012x}7{int(number[1:]):019d}") if born else parse_id(Token, number)


def parse_written(args: Arguments) -> tuple[WriterId, Token]:
    """A writer and a token; `alone` stands for a token that comes alone."""
    writer, token = args.next("a writer"), parse_token(args.next("a token"))
    return (writer_of(token) if writer == "alone" else parse_id(WriterId, writer)), token


def _digest(args: Arguments) -> bytes:
    return args.named("digest", "").encode()


def _flush_outcomes(args: Arguments) -> c.Flush:
    """A flush to the file of that number; scripts have no blobs to write one to."""
    flushed = tuple(parse_token(word)[1:] for word in args.named("flushed", "").split(",") if word)
    merged = tuple(_spill_file(word) for word in args.named("merged", "").split(",") if word)
    born = [int(ms) for ms in args.named("born", "0-0").split("-")]
    file = SpillFile(_spill_file(args.named("file")), 100, 90, len(flushed), *born, args.flag("unnumbered"))
    return c.Flush(OUTCOMES, merged, flushed, file)


def _spill_file(number: str) -> str:
    return f"{shard_id_of(NAME)}/s/x{number.zfill(32)}.spill"


def _frontier(args: Arguments) -> Antichain:
    return parse_frontier(args.next("a frontier"))


def _optional_value(word: str) -> int | None:
    return None if word == "-" else int(word)


def parse_attribute_key(word: str) -> AttributeKey:
    if not re.fullmatch(r"a\d{1,30}", word):
        raise ScriptError(f"{word} is no attribute; write a1")
    return AttributeKey("aa" + word[1:].zfill(30))


def parse_update(word: str) -> AttributeUpdate:
    verb, name, *values = word.split(":")
    key = EVENT_COUNT if name == "events" else parse_attribute_key(name)
    if verb == "set":
        return AttributeUpdate.replace(key, int(values[0]))
    if verb == "greater":
        return AttributeUpdate.replace_if_greater(key, int(values[0]))
    if verb == "equals":
        return AttributeUpdate.replace_if_equals(key, int(values[1]), _optional_value(values[0]))
    if verb == "add":
        return AttributeUpdate.accumulate(key, int(values[0]))
    if verb == "delete":
        return AttributeUpdate.delete(key)
    return AttributeUpdate(key, verb, 0)


def _attributes(args: Arguments) -> tuple[AttributeUpdate, ...]:
    words = args.optional("attributes")
    return () if words is None else tuple(parse_update(word) for word in words.split(","))


def _scan(args: Arguments) -> c.ScanAttributes:
    upper = args.optional("upper")
    return c.ScanAttributes(
        parse_attribute_key(args.named("lower", "a0")),
        None if upper is None else parse_attribute_key(upper),
        args.number("limit", 1000),
    )


def _flush(args: Arguments) -> c.FlushAttributes:
    """A flush of these values that leaves the tree empty: scripts have no blobs to write one to."""
    before, after = args.number("from", 0), args.number("to", 1)
    names = args.rest()
    values = {parse_attribute_key(word.split(":")[0]): _optional_value(word.split(":")[1]) for word in names}
    return c.FlushAttributes(IndexRoot(before), IndexRoot(after), {}, values)


def _erasure(number: str) -> str:
    return f"e{number.zfill(32)}"


def _history(word: str) -> int | None:
    return {"none": 0, "forever": None}[word] if word in ("none", "forever") else int(word)


def _optional_number(word: str | None) -> int | None:
    return None if word is None else int(word)


def _rewrite(args: Arguments, operation: str, as_of: int | None = None, **parts: Any) -> c.Rewrite:
    """A rewrite with these parts, as of the time before the upper that it expects where no other one is given."""
    writer, token, expected, digest = *parse_written(args), _frontier(args), _digest(args)
    latest = (expected.element or 0) - 1 if as_of is None else as_of
    return c.Rewrite(writer, token, expected, latest, operation, parse_runs(args.rest()), digest=digest, **parts)


def _passes(args: Arguments) -> c.PassedCut | None:
    cut_ms = _optional_number(args.optional("passes"))
    return None if cut_ms is None else c.PassedCut(cut_ms, args.flag("overran"))


def _of_life(args: Arguments) -> c.Command:
    """`of-life 0 insert …`: a command of a handle that was opened in that life of the name."""
    life, verb = int(args.next("a life")), args.next("a verb")
    return replace(parse_command(verb, args), shard=shard_id_of(NAME, life))


def parse_command(verb: str, args: Arguments) -> c.Command:
    """The command; one of a writer has a short lease, unless the script gives another one."""
    command = COMMANDS[verb](args)
    if isinstance(command, c.WriterCommand):
        return replace(command, lease_ms=args.number("lease", LEASE_MS))
    return command


COMMANDS: dict[str, Callable[[Arguments], c.Command]] = {
    "expire-writer": lambda a: c.ExpireWriter(_writer(a)),
    "compare-and-append": lambda a: c.CompareAndAppend(
        *parse_written(a), _frontier(a), _frontier(a), parse_runs(a.rest()), _attributes(a), digest=_digest(a)
    ),
    "append": lambda a: c.Append(
        *parse_written(a), _frontier(a), _frontier(a), parse_runs(a.rest()), _attributes(a), digest=_digest(a)
    ),
    "insert": lambda a: c.Insert(*parse_written(a), parse_runs(a.rest()), _attributes(a), digest=_digest(a)),
    "restore": lambda a: _rewrite(a, c.RESTORE, undoes=a.number("as-of", 0)),
    "truncate": lambda a: _rewrite(a, c.TRUNCATE, truncates=a.number("as-of", 0) + 1, passes=_passes(a)),
    "drop-before": lambda a: _rewrite(
        a, c.DROP_BEFORE, tombstone=Antichain(a.number("as-of", 0) + 1), passes=_passes(a)
    ),
    "edit": lambda a: _rewrite(
        a,
        a.named("verb", "upsert"),
        a.number("as-of", 0),
        question=a.named("question", "").encode(),
        tombstone=EMPTY if a.flag("drops") else None,
        attributes=_attributes(a),
    ),
    "reshape": lambda a: _rewrite(
        a,
        "overwrite",
        a.number("as-of", 0),
        schema=c.SchemaChange(a.number("expected", 1), SchemaRecord(a.named("schema").encode(), ("k",))),
        tombstone=EMPTY if a.flag("drops") else None,
    ),
    "erase": lambda a: _rewrite(
        a,
        c.ERASE,
        a.number("as-of", 0),
        question=a.named("question", "").encode(),
        erasure=c.NewErasure(
            _erasure(a.named("id")), _optional_number(a.optional("deadline")), a.named("reason", ""), a.flag("tags")
        ),
    ),
    "read-erasures": lambda a: c.ReadErasures(),
    "note-rewritten": lambda a: c.NoteRewritten(_erasure(a.next("a number")), Doomed(a.number("blobs", 0))),
    "prove-erasure": lambda a: c.ProveErasure(
        _erasure(a.next("a number")), Proof(0, SeqNo(a.number("horizon", 1)), 1, 1, 1)
    ),
    "advance-upper": lambda a: c.AdvanceUpper(_frontier(a)),
    "update-attributes": lambda a: c.UpdateAttributes(
        *parse_written(a), tuple(parse_update(word) for word in a.rest()), digest=_digest(a)
    ),
    "read-attributes": lambda a: c.ReadAttributes(
        tuple(
            EVENT_COUNT if w == "events" else BYTE_COUNT if w == "bytes" else parse_attribute_key(w) for w in a.rest()
        )
    ),
    "scan-attributes": _scan,
    "flush-attributes": _flush,
    "flush-outcomes": _flush_outcomes,
    "register-reader": lambda a: c.RegisterReader(
        _reader(a), _optional_frontier(a.optional("since")), a.number("lease", LEASE_MS), a.named("purpose", "")
    ),
    "heartbeat-reader": lambda a: c.DowngradeSince(_reader(a), None, SeqNo(a.number("seqno", 1_000)), False),
    "downgrade-since": lambda a: c.DowngradeSince(_reader(a), _frontier(a), SeqNo(a.number("seqno", 1_000))),
    "move-hold": lambda a: c.DowngradeSince(_reader(a), _frontier(a), SeqNo(a.number("seqno", 1_000)), False),
    "expire-reader": lambda a: c.ExpireReader(_reader(a)),
    "register-critical": lambda a: c.RegisterCriticalReader(
        _critical(a),
        a.named("opaque"),
        a.named("purpose", ""),
        _optional_frontier(a.optional("since")),
        a.flag("force"),
        _optional_seqno(a.optional("seen")),
    ),
    "downgrade-critical": lambda a: c.CompareAndDowngradeSince(
        _critical(a), a.named("expected"), a.named("opaque"), _frontier(a), a.flag("force"), _hold(a)
    ),
    "expire-critical": lambda a: c.ExpireCriticalReader(_critical(a), a.named("expected"), _hold(a)),
    "resolve-time": lambda a: c.ResolveTime(int(a.next("milliseconds"))),
    "times-shown": lambda a: c.TimesShown(
        int(a.next("the first time")), int(a.next("the last time")), a.number("limit", MARKS_PAGE_MAX)
    ),
    "lower-seal": lambda a: c.LowerSeal(),
    "read-retention": lambda a: c.ReadRetention(),
    "take-cut": lambda a: c.TakeCuts((int(a.next("an instant")),)),
    "take-no-cut": lambda a: c.TakeCuts(),
    "retract-aged": lambda a: _rewrite(a, c.TRUNCATE, a.number("as-of", 0), settings_version=a.number("version", 0)),
    "note-looked": lambda a: c.NoteLooked(_looked(a), a.flag("overran")),
    "set-rung": lambda a: c.TakeCuts((), (Rung(a.next("a tag"), int(a.next("an instant"))),)),
    "set-settings": lambda a: c.SetSettings(
        a.number("expected", 0), _history(a.named("history")), a.number("every", 1000), _row_policy(a)
    ),
    "forget-outlived": lambda a: c.ForgetOutlived(_optional_number(a.optional("before"))),
    "forget-history": lambda a: c.ForgetHistory(_frontier(a)),
    "set-tag": lambda a: c.SetTag(a.next("a tag"), int(a.next("a time")), _optional_number(a.optional("keep"))),
    "remove-tag": lambda a: c.RemoveTag(a.next("a tag")),
    "hold-point": lambda a: c.RegisterReader(
        _reader(a),
        Antichain(a.number("time", 0)),
        a.number("lease", LEASE_MS),
        a.named("purpose", ""),
        point=True,
        tag=a.named("tag", ""),
    ),
    "evolve-schema": lambda a: c.EvolveSchema(
        a.number("expected", 1),
        SchemaRecord(a.next("a schema").encode(), ("k",)),
        _optional_frontier(a.optional("upper")),
    ),
    "drop": lambda a: c.Drop(a.flag("force")),
    "finalise": lambda a: c.Finalise(),
    "recreate": lambda a: c.Recreate(
        SchemaRecord(a.next("a schema").encode(), ("k",)), shard=shard_id_of(NAME, a.number("from", 0))
    ),
    "lend": lambda a: c.Lend(
        _loan(a), a.next("a borrower"), _list(a), a.number("keys", 1), SeqNo(int(a.named("at").removeprefix("v")))
    ),
    "lend-on": lambda a: c.LendOn(
        _loan(a), a.next("a borrower"), _list(a), a.number("keys", 1), _loan(a), list_name(a.named("of"))
    ),
    "shrink-loan": lambda a: c.ShrinkLoan(_loan(a), _list(a), list_name(a.named("to")), a.number("keys", 1)),
    "end-loan": lambda a: c.EndLoan(_loan(a)),
    "returned": lambda a: c.Returned(_loan(a)),
    "hand-over": lambda a: c.HandOver(0, a.number("epoch", 2)),
    "take-back": lambda a: c.HandOver(a.number("epoch", 2), 0),
    "begin-clone": _begin_clone,
    "of-life": _of_life,
    "add-rollup": _add_rollup,
    "remove-rollups": lambda a: c.RemoveRollups(SeqNo(int(a.named("below").removeprefix("v")))),
    "hold-claim": _hold_claim,
    "release-claim": lambda a: c.ReleaseClaim(a.next("a claim"), a.next("an owner")),
    "merge": _merge,
    "forget-lapsed": lambda a: c.ForgetLapsed(staged_before_ms=a.number("staged", 0)),
}


CONSTANTS = {
    "attribute_updates_max": (attribute_updates, "UPDATES_MAX"),
    "marks_overlay_max": (wall_clocks, "MARKS_OVERLAY_MAX"),
    "finalise_batches_per_step": (lifecycle, "FINALISE_BATCHES_PER_STEP"),
    "outcomes_max": (outcomes_and_audit, "OUTCOMES_MAX"),
    "overlay_room": (states, "OVERLAY_ROOM"),
    "readers_max": (reader_holds, "READERS_MAX"),
    "writers_max": (writers, "WRITERS_MAX"),
}  # limits that no setting changes, by the names that `policy` takes


class StepInterpreter:
    """Commands of one line are committed together. A line that commits is followed by the new seqno."""

    def __init__(self) -> None:
        self.shard = Shard()
        self.told: set[type] = set()  # which commands the script has used
        self._constants: dict[str, int] = {}

    @contextmanager
    def _limits(self) -> Iterator[None]:
        """Commits under the constants that the script has set by `policy`."""
        with ExitStack() as stack:
            for name, most in self._constants.items():
                stack.enter_context(patch.object(*CONSTANTS[name], most))
            yield

    def __call__(self, group: list[Arguments]) -> list[str]:
        if len(group) == 1 and group[0].verb in {
            "policy",
            "tick",
            "expire-lapsed",
            "state",
            "upper",
            "phase",
            "new-shard",
            "lease-clock",
            "clock",
        }:
            return self._look(group[0])
        commands = []
        for args in group:
            if args.verb not in COMMANDS:
                raise ScriptError(f"there is no verb {args.verb!r}")
            commands.append(parse_command(args.verb, args))
            args.finish()
        self.told |= {type(command) for command in commands}
        before = self.shard.state
        with self._limits():
            shown = [show_result(result) for result in self.shard.commit(*commands)]
        if any(isinstance(command, c.Flush) for command in commands):  # what left the State is in a file
            moved = {k: v for k, v in before.outcomes.items() if k not in self.shard.state.outcomes}
            self.shard.files = {**self.shard.files, **moved}
        if self.shard.state is not before:
            shown[-1] += f" -> v{self.shard.state.seqno}"
        return shown

    def _look(self, args: Arguments) -> list[str]:
        before = self.shard.state
        if args.verb == "policy":
            limits = asdict(self.shard.policy)
            self.shard.policy = Policy(**{name: args.number(name, most) for name, most in limits.items()})
            for name, (module, constant) in CONSTANTS.items():
                self._constants[name] = args.number(name, self._constants.get(name, getattr(module, constant)))
            output = ["ok"]
        elif args.verb == "tick":
            self.shard.now_ms += int(args.next("milliseconds"))
            output = [f"now {self.shard.now_ms}"]
        elif args.verb == "expire-lapsed":
            self.shard.expire_lapsed()
            output = ["nothing lapsed" if self.shard.state is before else f"expired -> v{self.shard.state.seqno}"]
        elif args.verb == "new-shard":
            self.shard = Shard()
            output = ["ok"]
        elif args.verb == "lease-clock":
            self.shard.has_lease_clock = True
            output = ["ok"]
        elif args.verb == "clock":
            kind = args.next("checked or unchecked")
            if kind not in ("checked", "unchecked"):
                raise ScriptError(f"a clock is checked or unchecked, not {kind}")
            self.shard.is_stamped, self.shard.is_checked = True, kind == "checked"
            output = ["ok"]
        elif args.verb == "phase":
            output = [phase_of(self.shard.state).value]
        elif args.verb == "upper":
            output = [f"since={self.shard.state.since} upper={self.shard.state.upper}"]
        else:
            output = show_state(self.shard.state)
        args.finish()
        return output
