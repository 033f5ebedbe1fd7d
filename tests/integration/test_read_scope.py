"""Who may only read changes nothing for anybody: every command and every route, with a token of the scope `read`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import persist
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.attribute import NO_INDEX, AttributeKey, AttributeUpdate
from persist.core.audit_log import EntryFile
from persist.core.blob_keys import entries_key, loan_key, rollup_key
from persist.core.erasure import Doomed, Proof
from persist.core.frontier import EMPTY, Antichain
from persist.core.ids import CriticalReaderId, LoanId, ReaderId, SeqNo, Token, WriterId
from persist.core.shard_settings import Looked, Rung
from persist.core.state import SchemaRecord, State
from persist.formats.http_messages import decode_result
from persist.formats.records import encoded
from rpc.app import create_app
from rpc.auth import mint
from rpc.settings import ServerSettings
from tests.support.location import AscendingIds, InlineBackground

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
KEY = AttributeKey("7" * 32)
READER, OTHER, POINT = (ReaderId("r" + digit * 32) for digit in "123")
WRITER, TOKEN = WriterId("w" + "1" * 32), Token("i" + "1" * 32)
LOAN = LoanId("l" + "1" * 32)
CRITICAL = CriticalReaderId("c" + "1" * 32)
UPPER = 10
FAR = SeqNo(1_000)
EVENTS = {"accept": "text/event-stream"}


class Place:
    """A server that asks for tokens, a shard with ten times, and a token that may only read."""

    def __init__(self, directory: Path) -> None:
        self.location = Location(MemoryBlob(), MemoryConsensus(), background=InlineBackground())
        self.tokens = {}
        entries = []
        for scope in c.SCOPES:
            self.tokens[scope], digest = mint(scope)
            entries.append({"id": scope, "sha256": digest, "scopes": [scope]})
        file = directory / "tokens.json"
        file.write_text(json.dumps({"tokens": entries}))
        self.app = create_app(self.location, ServerSettings(tokens_file=str(file)))
        self.http = TestClient(self.app)
        client = persist.Client(self.app.state.service.transport)
        shard = client.create_shard(NAME, SCHEMA, ["id"])
        for number in range(UPPER):
            shard.insert([{"id": number, "v": "x"}])
        shard.attributes.update(AttributeUpdate.replace(KEY, 7))

    def __enter__(self) -> Self:
        self.http.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.http.__exit__()
        self.location.close()

    @property
    def state(self) -> State:
        return self.location.machine(NAME).refresh()

    def told(self) -> tuple[Any, ...]:
        """All that others notice of a shard."""
        state = self.state
        held = state.critical_readers, state.tombstone
        return state.since, state.upper, dict(state.attributes), dict(state.schemas), state.trace.batches, held

    def call(self, scope: str, method: str, path: str, **more: Any) -> Any:
        headers = {"authorization": f"Bearer {self.tokens[scope]}", **more.pop("headers", {})}
        return self.http.request(method, path, headers=headers, **more)

    def send(self, scope: str, command: c.Command) -> Any:
        return self.call(scope, "POST", f"/v1/shards/{NAME}/commands", content=encoded(command))

    def sent(self, scope: str, command: c.Command) -> c.Result:
        answer = self.send(scope, command)
        assert answer.status_code == 200, answer.text
        return decode_result(answer.content)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as found:
        yield found


def commands(place: Place) -> list[c.Command]:
    shard_id = place.state.shard_id
    schema = SchemaRecord(b"", ())
    return [
        c.RegisterWriter(WRITER, 60_000),
        c.HeartbeatWriter(WRITER),
        c.ExpireWriter(WRITER),
        c.CompareAndAppend(WRITER, TOKEN, Antichain(UPPER), Antichain(UPPER + 1), ()),
        c.Append(WRITER, TOKEN, Antichain(UPPER), Antichain(UPPER + 1), ()),
        c.Insert(WRITER, TOKEN, ()),
        c.Restore(WRITER, TOKEN, Antichain(UPPER), 0, ()),
        c.Truncate(WRITER, TOKEN, Antichain(UPPER), 0, ()),
        c.DropBefore(WRITER, TOKEN, EMPTY, 0, ()),
        c.Edit(WRITER, TOKEN, Antichain(UPPER), UPPER - 1, (), verb="delete"),
        c.Reshape(WRITER, TOKEN, Antichain(UPPER), UPPER - 1, (), verb="overwrite", expected_id=1, schema=schema),
        c.Erase(WRITER, TOKEN, Antichain(UPPER), UPPER - 1, (), erasure="e" + "1" * 32),
        c.ReadErasures(),
        c.NoteRewritten("e" + "1" * 32, Doomed()),
        c.ProveErasure("e" + "1" * 32, Proof(1, SeqNo(1), 1, 1, 1)),
        c.AdvanceUpper(Antichain(UPPER + 5)),
        c.UpdateAttributes(WRITER, TOKEN, (AttributeUpdate.replace(KEY, 8),)),
        c.ReadAttributes((KEY,)),
        c.ScanAttributes(KEY),
        c.FlushAttributes(NO_INDEX, NO_INDEX, {}, {}),
        c.FlushOutcomes((), (), None),
        c.FlushEntries(
            (), SeqNo(1), SeqNo(1), EntryFile(entries_key(shard_id, AscendingIds()), 1, 0, 1, SeqNo(1), FAR)
        ),
        c.RegisterReader(READER, Antichain(9), 60_000),
        c.RegisterReader(OTHER, None, 60_000),
        c.HeartbeatReader(READER),
        c.DowngradeSince(READER, Antichain(9), FAR),
        c.DowngradeSince(OTHER, Antichain(9), FAR),
        c.DowngradeSince(OTHER, EMPTY, FAR),
        c.MoveHold(READER, EMPTY, FAR),
        c.ExpireReader(OTHER),
        c.RegisterCriticalReader(CRITICAL, "", "cursor"),
        c.CompareAndDowngradeSince(CRITICAL, "", "", Antichain(9)),
        c.ExpireCriticalReader(CRITICAL, ""),
        c.ResolveTime(0),
        c.TimeShown(0),
        c.TimesShown(0, 0),
        c.LowerSeal(),
        c.ReadShardSettings(),
        c.SetSettings(0, 0),
        c.AgeHistory(0),
        c.ForgetHistory(Antichain(1)),
        c.SetTag("mine", 1),
        c.SetTag("eom", 2, 1),
        c.RemoveTag("eom"),
        c.ReadTags(),
        c.ReadSchemaTimes(),
        c.ReadCriticalReaders((CRITICAL,)),
        c.ReadRetention(),
        c.TakeCut(1),
        c.PassCut(1, 1),
        c.RetractAged(WRITER, TOKEN, Antichain(UPPER), UPPER - 1, (), version=1),
        c.NoteLooked(Looked(1, UPPER, 1)),
        c.SetRungs((Rung("hourly-2026-11-23T04Z", 1),)),
        c.ForgetTags(),
        c.ForgetDropped(),
        c.HoldPoint(POINT, 60_000, time=2),
        c.DowngradeSince(POINT, Antichain(2), FAR),
        c.ExpireReader(POINT),
        c.Lend(LOAN, "clone", loan_key(shard_id, AscendingIds()), 1, SeqNo(1)),
        c.LendOn(LOAN, "clone", loan_key(shard_id, AscendingIds()), 1, LOAN, ""),
        c.ShrinkLoan(LOAN, "", "", 1),
        c.EndLoan(LOAN),
        c.Returned(LOAN),
        c.BeginClone(place.state),
        c.HandOver(2),
        c.TakeBack(2),
        c.EvolveSchema(1, schema),
        c.Constrain(1, schema),
        c.Drop(True),
        c.Recreate(schema),
        c.Finalise(),
        c.AddRollup(SeqNo(3), rollup_key(shard_id, SeqNo(3), AscendingIds()), 1),
        c.RemoveRollups(FAR),
        c.TakeClaim("merge:[0]", "me", 60_000),
        c.SaveMergeProgress("merge:[0]", "me", (), (), b"", Antichain(0)),
        c.ReleaseClaim("merge:[0]", "me"),
        c.ForgetLapsed(),
        c.RefuseStagedBefore(1),
        c.MergeResult((), (), Antichain(9)),
        c.BundleParts((), ()),
        c.ReplacePart(next(place.state.trace.parts()).id),
    ]


def test_no_command_changes_anything_for_others(place: Place) -> None:
    """A token for reading could make a shard forget its history, and close it to reads for ever."""
    tried = commands(place)
    assert {type(command) for command in tried} == set(c.kinds(c.Command)), "every command is in the table"
    before = place.told()
    for command in tried:
        answer = place.send("read", command)
        assert (answer.status_code == 403) == ("read" not in command.scopes), (command, answer.text)
        assert place.told() == before, command
    place.sent("read", c.ExpireReader(READER))
    assert place.told() == before


def test_who_may_write_moves_no_since_and_no_cursor_changes_no_schema_and_closes_nothing(place: Place) -> None:
    def told() -> tuple[Any, ...]:
        state = place.state
        return state.since, state.critical_readers, state.tags, state.settings, dict(state.schemas), state.is_closed

    before = told()
    closing = [
        c.CompareAndAppend(WRITER, TOKEN, Antichain(UPPER), EMPTY, ()),
        c.Append(WRITER, TOKEN, Antichain(UPPER), EMPTY, ()),
    ]
    for command in [*commands(place), *closing]:
        answer = place.send("write", command)
        is_refused = command in closing or ("read" not in command.scopes and "write" not in command.scopes)
        assert (answer.status_code == 403) == is_refused, (command, answer.text)
        assert told() == before, command
    for path in (f"append?lower={UPPER}&upper=[]", f"compare-and-append?expected_upper={UPPER}&new_upper=[]"):
        answer = place.call("write", "POST", f"/v1/shards/{NAME}/{path}&format=csv", content=b"id,v\n")
        assert (answer.status_code, answer.json()["kind"]) == (403, "forbidden")
    assert not place.state.upper.is_empty


def test_no_route_changes_anything_for_others(place: Place) -> None:
    before = place.told()
    tried = 0
    for path, verbs in place.app.openapi()["paths"].items():
        for verb in verbs:
            full = path.replace("{name}", NAME).replace("{key}", "a").replace("{tag}", "eom").replace("{erasure}", "e1")
            if full.endswith("/listen"):
                continue  # it never ends; below
            for query in (
                "",
                "?upper=50",
                "?since=9",
                "?since=9&cursor=mine&force=true",
                "?force=true",
                "?start=0",
                "?as_of=0",
            ):
                place.call("read", verb.upper(), full + query, content=b"")
                tried += 1
            assert place.told() == before, (verb, path)
    assert tried > 50


def test_a_listener_that_may_only_read_moves_nothing(place: Place) -> None:
    before = place.told()
    answer = place.call("read", "GET", f"/v1/shards/{NAME}/listen?until=9", headers=EVENTS)
    assert "data:" in answer.text
    assert place.told() == before


@pytest.mark.parametrize("scope", ["read", "write", "maintain"])
def test_only_a_reader_that_may_manage_moves_since(place: Place, scope: str) -> None:
    place.sent(scope, c.RegisterReader(READER, Antichain(0), 60_000))
    told = place.sent(scope, c.DowngradeSince(READER, Antichain(9), FAR))
    assert told == c.SinceDowngraded(Antichain(9), Antichain(0))
    assert place.state.since == Antichain(0)
    told = place.sent("manage", c.DowngradeSince(READER, Antichain(9), FAR))
    assert told == c.SinceDowngraded(Antichain(9), Antichain(9))
    assert place.state.since == Antichain(9)
