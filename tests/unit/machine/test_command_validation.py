"""Every command is validated where it enters, by one function: so no log entry need be read again after it was made."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import msgspec
import msgspec.inspect as mi
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.command_queue import CommandQueue
from persist.commit.commit_plan import PlanInput, plan_commit, supplied
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.audit_log import Caller
from persist.core.batch import Part
from persist.core.errors import InvalidUsage, PersistError, Unavailable, UpgradeNeeded
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.record import replace
from persist.core.shard_settings import ShardSettings
from persist.core.state import Policy, SchemaRecord, State
from persist.core.transitions.context import SOUND, Context, Indexed
from persist.formats.http_messages import RECORD, decode_command, validate_command
from persist.formats.records import encoded
from persist.formats.state_frames import decode_diff, encode_diff
from rpc.app import create_app
from rpc.settings import ServerSettings
from tests.support.each_command import KEY, each_command
from tests.support.location import memory_location
from tests.support.scopes_page import UPPER
from tests.support.shard import NAME
from tests.unit.core.strategies import SHARD, parts, states

KINDS = c.kinds(c.Command)
INT_MIN, INT_MAX = -(2**63), 2**64 - 1  # that a log entry has room for
NUMBERS = (0, 1, 2, 3, 8, 2**31, 2**48 - 1, 2**53, TIME_MAX, TIME_MAX + 1, 2**63, -1, INT_MIN, INT_MAX)
WRONG = (None, True, 1.5, "x", "\ud800", b"x", -1, 2**64, (), ("x",), {}, {1: "x"}, object(), 7, INT_MIN, 10**9)
_LETTER = re.compile(r"\\A([a-z])\[0-9a-f\]\{32\}\\Z")


def values(kind: Any) -> st.SearchStrategy[Any]:
    """What a field of this type may hold."""
    if isinstance(kind, mi.StructType):
        return structs(kind)
    if isinstance(kind, mi.UnionType):
        return st.one_of([values(member) for member in kind.types])
    if isinstance(kind, mi.IntType):
        return st.sampled_from([n for n in NUMBERS if is_valid(kind, n)])
    if isinstance(kind, mi.StrType):
        return texts(kind)
    if isinstance(kind, mi.BytesType):
        return st.binary(max_size=min(kind.max_length or 8, 8))
    if isinstance(kind, (mi.VarTupleType, mi.ListType)):
        return st.lists(values(kind.item_type), max_size=min(kind.max_length or 2, 2)).map(tuple)
    if isinstance(kind, mi.TupleType):
        return st.tuples(*map(values, kind.item_types))
    if isinstance(kind, mi.DictType):
        return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=2)
    if isinstance(kind, mi.LiteralType):
        return st.sampled_from(kind.values)
    return {mi.BoolType: st.booleans(), mi.NoneType: st.none()}[type(kind)]


def structs(kind: mi.StructType) -> st.SearchStrategy[Any]:
    if kind.cls is State:
        return states()
    fields = {field.name: values(field.type) for field in kind.fields}
    made = st.builds(kind.cls, **fields)
    return made | st.integers(0, 12).flatmap(parts) if kind.cls is Part else made


def texts(kind: mi.StrType) -> st.SearchStrategy[str]:
    letter = _LETTER.match(kind.pattern or "")
    if letter is not None:
        numbered = st.integers(0, 12).map(lambda n: f"{letter[1]}{n:032x}")
        return numbered | st.just(SHARD) if letter[1] == "s" else numbered
    found = st.from_regex(kind.pattern, fullmatch=True) if kind.pattern else st.text(max_size=6) | st.just(NAME)
    return found.filter(lambda text: is_valid(kind, text))


def is_valid(kind: Any, value: Any) -> bool:
    """Whether a field of this type may hold the value. It is said a second time here, of the types alone."""
    if isinstance(kind, mi.StructType):
        if type(value) is not kind.cls or kind.cls is State:
            return type(value) is kind.cls
        return all(is_valid(field.type, getattr(value, field.name)) for field in kind.fields)
    if isinstance(kind, mi.UnionType):
        return any(is_valid(member, value) for member in kind.types)
    if isinstance(kind, mi.IntType):
        low, high = INT_MIN if kind.ge is None else kind.ge, INT_MAX if kind.le is None else kind.le
        low = low if kind.gt is None else max(low, kind.gt + 1)
        return type(value) is int and max(low, INT_MIN) <= value <= min(high, INT_MAX)
    if isinstance(kind, mi.StrType):
        return type(value) is str and has_length(kind, value) and is_written(value) and is_like(kind.pattern, value)
    if isinstance(kind, mi.BytesType):
        return type(value) is bytes and has_length(kind, value)
    if isinstance(kind, (mi.VarTupleType, mi.ListType)):
        return type(value) is tuple and has_length(kind, value) and all(is_valid(kind.item_type, x) for x in value)
    if isinstance(kind, mi.TupleType):
        pairs = zip(kind.item_types, value, strict=True) if type(value) is tuple else ()
        return type(value) is tuple and len(value) == len(kind.item_types) and all(is_valid(t, x) for t, x in pairs)
    if isinstance(kind, mi.DictType):
        fits = isinstance(value, Mapping) and has_length(kind, value)
        return fits and all(is_valid(kind.key_type, k) and is_valid(kind.value_type, v) for k, v in value.items())
    if isinstance(kind, mi.LiteralType):
        return type(value) is str and value in kind.values
    return {mi.BoolType: type(value) is bool, mi.NoneType: value is None}[type(kind)]


def has_length(kind: Any, value: Any) -> bool:
    return (kind.min_length or 0) <= len(value) <= (INT_MAX if kind.max_length is None else kind.max_length)


def is_written(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def is_like(pattern: str | None, text: str) -> bool:
    return pattern is None or re.search(pattern, text) is not None


@st.composite
def near(draw: st.DrawFn, kind: Any) -> Any:
    """A value of this type with one other value somewhere in it, which may fit as well."""
    if isinstance(kind, mi.StructType) and kind.cls is not State and kind.fields:
        field = draw(st.sampled_from(kind.fields))
        return replace(draw(structs(kind)), **{field.name: draw(near(field.type))})
    if isinstance(kind, mi.UnionType) and draw(st.booleans()):
        return draw(near(draw(st.sampled_from(kind.types))))
    if isinstance(kind, mi.VarTupleType) and draw(st.booleans()):
        return (*draw(values(kind)), draw(near(kind.item_type)))
    if isinstance(kind, mi.DictType) and draw(st.booleans()):
        is_key = draw(st.booleans())
        key = draw(near(kind.key_type) if is_key else values(kind.key_type))
        with suppress(TypeError):  # no mapping can have it
            return {key: draw(values(kind.value_type) if is_key else near(kind.value_type))}
    return draw(st.sampled_from(WRONG))


def commands(kind: type[c.Command]) -> st.SearchStrategy[c.Command]:
    return structs(mi.type_info(kind))  # type: ignore[arg-type]


of_each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@of_each_kind
@given(st.data())
def test_a_command_that_passes_encodes_and_decodes_to_the_same(kind: type[c.Command], data: st.DataObject) -> None:
    command = data.draw(commands(kind))
    passed = validate_command(command)
    assert passed == command == decode_command(encoded(command))
    assert type(passed) is kind
    assert encoded(passed) == encoded(command)


class Doors:
    """A shard behind the two doors of commands: a program that commits itself, and a server."""

    def __init__(self) -> None:
        self.location = memory_location()
        self.transport = EmbeddedTransport(self.location)
        Client(self.transport).create_shard(NAME, pa.schema([("id", pa.int64())]), ["id"])
        self.http = TestClient(create_app(self.location, ServerSettings()), base_url="http://localhost")

    def close(self) -> None:
        self.location.close()

    def log_bytes(self) -> list[bytes]:
        return [entry.data for entry in self.location.consensus.scan(NAME, 1, 1_000)]


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    found = Doors()
    with found.http:
        yield found
    found.close()


@of_each_kind
@given(st.data())
def test_a_command_with_another_value_passes_if_that_fits_and_is_refused_before_anything_is_queued_if_not(
    kind: type[c.Command], doors: Doors, data: st.DataObject
) -> None:
    info = mi.type_info(kind)
    command = data.draw(near(info))
    try:
        passed = validate_command(command)
    except InvalidUsage:
        assert not is_valid(info, command)
    else:
        assert is_valid(info, passed)
        assert passed == command or not is_valid(info, command), "only a tuple of fields may be read as its record"
        return
    before = doors.log_bytes()
    with patch.object(CommandQueue, "enqueue", refuse_to_queue):
        with pytest.raises(InvalidUsage):
            doors.transport.apply(NAME, command)
        # No bytes hold some values, so none can be sent. A word that is not known here may be a newer build's.
        with pytest.raises((InvalidUsage, UpgradeNeeded)):
            decode_command(encoded(command))
    assert doors.log_bytes() == before


@of_each_kind
def test_a_server_refuses_such_a_command_before_anything_is_queued(kind: type[c.Command], doors: Doors) -> None:
    fields = [1.5 for field in mi.type_info(kind).fields]  # type: ignore[attr-defined]
    before = doors.log_bytes()
    with patch.object(CommandQueue, "enqueue", refuse_to_queue):
        body = msgspec.msgpack.encode([kind.__struct_config__.tag, *fields])
        answer = doors.http.post(f"/v1/shards/{NAME}/commands", content=body, headers={"content-type": RECORD})
    assert (answer.status_code, answer.json()["kind"]) == (400, InvalidUsage.kind)
    assert doors.log_bytes() == before


def refuse_to_queue(queue: CommandQueue, pending: object) -> bool:
    raise AssertionError(f"{pending} was queued")


def supply_nothing(task: object) -> Exception:
    return Unavailable("no blob store is here")


@pytest.fixture(scope="module")
def lived() -> tuple[list[c.Command], list[State]]:
    """Commands of each kind, and the States that a shard has after each of them: through its life."""
    location = memory_location()
    shard = Client(EmbeddedTransport(location)).create_shard(NAME, pa.schema([("id", pa.int64())]), ["id"])
    for number in range(UPPER):
        shard.insert([{"id": number}])
    shard.attributes.update(AttributeUpdate.replace(KEY, 7))
    machine = location.machine(NAME)
    tried, found = each_command(machine.state()), [machine.state()]
    for command in tried:
        with suppress(PersistError):
            machine.apply(command)
        found += [machine.state()] if machine.state() is not found[-1] else []
    location.close()
    return tried, found


@st.composite
def near_one_of(draw: st.DrawFn, tried: list[c.Command]) -> c.Command:
    """One of these commands, with a few other values that fit."""
    command = draw(st.sampled_from(tried))
    fields = mi.type_info(type(command)).fields  # type: ignore[attr-defined]
    others = draw(st.lists(st.sampled_from(fields), max_size=2, unique_by=lambda field: field.name))
    return replace(command, **{field.name: draw(values(field.type)) for field in others})


@of_each_kind
@given(st.data())
def test_what_a_command_that_passes_puts_into_the_log_can_be_read(
    kind: type[c.Command], lived: tuple[list[c.Command], list[State]], data: st.DataObject
) -> None:
    """A shard whose log has an entry that nobody can read is lost."""
    tried, found = lived
    state = data.draw(st.sampled_from(found))
    command = data.draw(near_one_of([command for command in tried if type(command) is kind]))
    now_ms = data.draw(st.sampled_from([0, state.walltime_ms, 2**48 - 1]))
    facts = PlanInput(
        Context(
            now_ms,
            Policy(),
            indexed=Indexed(state.attribute_root.flushes, {}, {}),
            lease_clock_ms=state.lease_clock_ms,
            checked_ms=data.draw(st.none() | st.just(now_ms)),
        ),
        "commit",
        verdicts=[SOUND],
    )
    try:
        commit = supplied(plan_commit(state, [command], facts), supply_nothing)
        entry = b"" if commit.diff is None else encode_diff(commit.diff)
    except PersistError:
        return  # nothing is written
    assert not entry or decode_diff(entry) == commit.diff


@pytest.mark.parametrize(("schema", "settings"), [
    (SchemaRecord("no bytes", ("id",)), ShardSettings()),  # type: ignore[arg-type]
    (SchemaRecord(b"", "id"), ShardSettings()),  # type: ignore[arg-type]
    (SchemaRecord(b"", ("id",)), ShardSettings(history_ms=1.5)),  # type: ignore[arg-type]
])  # fmt: skip
def test_a_shard_is_not_created_with_what_no_command_may_hold(schema: SchemaRecord, settings: ShardSettings) -> None:
    location = memory_location()
    with pytest.raises(InvalidUsage):
        EmbeddedTransport(location).create("new", schema, settings=settings)
    assert location.consensus.head("new") is None
    location.close()


CALLERS = [
    Caller(1),  # type: ignore[arg-type]
    Caller("\ud800"),
    Caller("", b"no text"),  # type: ignore[arg-type]
    Caller("", "", "no bytes"),  # type: ignore[arg-type]
    Caller(None, None, None),  # type: ignore[arg-type]
    "nobody",
]


@pytest.mark.parametrize("caller", CALLERS)
def test_a_caller_of_whom_nobody_could_read_is_refused_before_anything_is_queued(caller: Any) -> None:
    location = memory_location()
    transport = EmbeddedTransport(location)
    shard = Client(transport).create_shard(NAME, pa.schema([("id", pa.int64())]), ["id"])
    kept = len(list(location.consensus.scan(NAME, 1, 1_000)))
    with pytest.raises(InvalidUsage):
        transport.apply(NAME, c.AdvanceUpper(Antichain(7)), caller)
    assert len(list(location.consensus.scan(NAME, 1, 1_000))) == kept
    with pytest.raises(InvalidUsage):
        transport.create("new", location.machine(NAME).state().schemas[1], caller=caller)
    assert location.consensus.head("new") is None
    assert [entry.operation for entry in shard.history(5)] == ["create"]
    location.close()
