"""Old bytes stay readable: the sample opens, reads as it did when it was written, and can be written to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from blob import open_blob
from consensus import ENDED
from persist.attributes import node_codec
from persist.commit.location import Location, open_location
from persist.copies.backup_creation import UPPER, BackupRequest, back_up
from persist.copies.backup_restore import RestoreRequest, restore
from persist.copies.backup_store import BackupStore
from persist.copies.state_file import export_state, import_state, read_file
from persist.copies.verify import Depth, verify_shards
from persist.core import commands as c
from persist.core.audit_log import ENDED as ENDED_DIGEST
from persist.core.audit_log import RETIRED, TokenOutcome
from persist.core.erasure_progress import pending_runs
from persist.core.spill import OUTCOMES
from persist.core.state import State
from persist.formats.http_messages import decode_command
from persist.formats.records import encoded
from persist.formats.spill_frames import LAYOUTS, decode_run, encode_run
from persist.formats.state_frames import THIS_BUILD
from rpc.cli.program import main
from tests.compat import fields, generate, sample
from tests.compat.sample import EXPECTED, HERE, STAGED, Write, expected, frames, opened_copy
from tests.support.location import client_of

SAMPLES = sorted(path.parent for path in HERE.glob(f"*/{EXPECTED}"))
WRITTEN = {pa.string(): "written on", pa.int64(): 1}  # into columns of these types; others may be null
BYTES_MAX = 480_000  # of a sample, which lies in the repository for ever

each_sample = pytest.mark.parametrize("frozen", SAMPLES, ids=lambda path: path.name)


@pytest.fixture
def copied(frozen: Path, tmp_path: Path) -> Iterator[Location]:
    """A copy of the sample, opened."""
    with closing(opened_copy(frozen, tmp_path / "location")) as location:
        yield location


def everything_committed(location: Location) -> dict[str, int]:
    """The newest seqno of each shard."""
    heads = {name: location.consensus.head(name) for name in location.names(with_dropped=True)}
    return {name: head.seqno for name, head in heads.items() if head is not None}


def blobs(location: Location) -> set[str]:
    return {stat.key for stat in location.blob.list("")}


def test_there_is_a_sample_of_every_format_version() -> None:
    assert [path.name for path in SAMPLES] == [f"v{version}" for version in THIS_BUILD.formats]
    for frozen in SAMPLES:
        assert sum(path.stat().st_size for path in frozen.rglob("*") if path.is_file()) < BYTES_MAX


@pytest.mark.smoke
@pytest.mark.proof
def test_the_sample_can_be_made_anew(tmp_path: Path) -> None:
    """What `python -m tests.compat.generate` makes holds every field, and is read the same after maintenance."""
    directory, at = tmp_path / sample.LOCATION, ["--dir", str(tmp_path / sample.LOCATION)]
    writes = generate.make(directory)
    generate.tidy(directory)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < BYTES_MAX
    first = generate.read(tmp_path, writes)
    with closing(opened_copy(tmp_path, tmp_path / "copied")) as copied:
        assert [where for where, frame in frames(copied).items() if sample.encoded_again(frame) != frame] == []
        used = fields.used([*map(sample.decoded, frames(copied).values()), decode_command(_staged(tmp_path))])
        assert fields.with_defaults(fields.DURABLE) - used - fields.unusable() == set()
    assert main(["maintain", "run", "--once", *at]) == 0
    again = generate.read(tmp_path, writes)
    for what in ("contents", "attributes", "cursors", "dropped"):
        assert again[what] == first[what], what


def _staged(directory: Path) -> bytes:
    return (directory / STAGED).read_bytes()


# --- what a sample says


@each_sample
def test_a_frozen_location_reads_as_it_did(frozen: Path, copied: Location) -> None:
    told, client = expected(frozen), client_of(copied)
    assert sample.contents(client) == told.contents
    assert sample.dropped(copied) == told.dropped
    assert copied.identity.check().epoch == told.epoch
    if told.writes:
        assert sample.attributes(client) == told.attributes
        assert sample.cursors(copied) == told.cursors


@each_sample
def test_a_frozen_location_can_be_written_on(frozen: Path, copied: Location) -> None:
    client = client_of(copied)
    for name, rows in expected(frozen).contents.items():
        shard = client.shard(name)
        upper = shard.upper().element
        assert upper is not None
        erased = pending_runs(copied.machine(name).refresh().erasures)  # which go with the next commit
        shard.insert([{column.name: WRITTEN[column.type] for column in shard.schema.arrow if column.type in WRITTEN}])
        assert shard.snapshot(upper).to_arrow().num_rows == len(rows[str(upper - 1)]) + 1 - sum(
            part.rows for run in erased for part in run.parts
        )


# --- tokens


@each_sample
def test_a_retry_of_each_token_is_answered_as_the_first_time_and_writes_nothing(frozen: Path, copied: Location) -> None:
    client, committed, held = client_of(copied), everything_committed(copied), blobs(copied)
    for write in expected(frozen).writes:
        assert write.again(client) == write.answer, write
    assert everything_committed(copied) == committed
    assert blobs(copied) == held


@each_sample
def test_a_token_that_comes_with_something_else_is_refused(frozen: Path, copied: Location) -> None:
    client, committed = client_of(copied), everything_committed(copied)
    for write in expected(frozen).writes:
        if write.answer == "outcome_forgotten":
            continue
        other = {"attributes": [*write.given["attributes"], ("ff" * 16, "replace", 1, None)]}
        assert replace(write, given={**write.given, **other}).again(client) == "token_reused", write
    assert everything_committed(copied) == committed


@each_sample
def test_the_tokens_of_a_sample_lie_wherever_tokens_can_lie(frozen: Path, copied: Location) -> None:
    states = {name: copied.machine(name).refresh() for name in copied.names()}
    places = {place_of(write, states[write.shard], copied) for write in expected(frozen).writes}
    assert places == {"State", "file", "ended life", "forgotten"}
    assert {write.verb for write in expected(frozen).writes} == {
        "insert",
        "compare_and_append",
        "append",
        "update_attributes",
    }
    digests = {outcome.digest for state in states.values() for outcome in state.outcomes.values()}
    in_files = {outcome.digest for state in states.values() for outcome in outcomes_in_files(state, copied).values()}
    assert RETIRED in digests | in_files, "a retired writer is remembered"


def place_of(write: Write, state: State, location: Location) -> str:
    """Where what is known of a token lies."""
    key = write.token[1:]
    if key in state.outcomes:
        return "ended life" if state.outcomes[key].digest == ENDED_DIGEST else "State"
    return "file" if key in outcomes_in_files(state, location) else "forgotten"


def outcomes_in_files(state: State, location: Location) -> dict[str, TokenOutcome]:
    layout = LAYOUTS[OUTCOMES]
    return {
        layout.from_key(key): layout.value(value)
        for file in state.files_of(OUTCOMES)
        for key, value in decode_run(location.blob.get(file.key), layout, file.index_at)
    }


@each_sample
def test_a_command_that_was_prepared_lands_once_by_its_receipts(frozen: Path, copied: Location) -> None:
    data = (frozen / STAGED).read_bytes()
    command = decode_command(data)
    assert isinstance(command, c.Insert)
    assert encoded(command) == data
    shard = client_of(copied).shard("orders")
    for part in (part for run in command.runs for part in run.parts):
        assert copied.versions.receipts.is_good(shard.view().shard_id, part)
    answer = copied.machine("orders").apply(command)
    assert isinstance(answer, c.Appended)
    time = answer.lower.element
    assert time is not None
    assert shard.snapshot(time).to_arrow().num_rows == shard.snapshot(time - 1).to_arrow().num_rows + 1
    assert copied.machine("orders").apply(command) == answer
    assert shard.upper() == answer.upper


# --- bytes


@each_sample
def test_what_the_bytes_hold_is_written_as_the_same_bytes(frozen: Path, copied: Location) -> None:
    for where, frame in frames(copied).items():
        assert sample.encoded_again(frame) == frame, where
    for name in copied.names():
        state = copied.machine(name).refresh()
        for kind, files in state.spilled.items():
            for file in files:
                data = copied.blob.get(file.key)
                pairs = list(decode_run(data, LAYOUTS[kind], file.index_at))
                assert encode_run(pairs, LAYOUTS[kind]) == (data, file.index_at), file
        root = state.attribute_root
        for first, chunk in state.attribute_chunks.items():
            if first <= root.offset < first + chunk.length:
                data = copied.blob.get_range(chunk.key, root.offset - first, root.length)
                assert node_codec.decode(data, root.offset).encode(root.offset) == data, chunk


@each_sample
def test_every_field_of_every_record_has_a_value_somewhere_in_the_sample(frozen: Path, copied: Location) -> None:
    """A field that is added is missing here until the sample holds it."""
    bodies = [sample.decoded(frame) for frame in frames(copied).values()]
    used = fields.used([*bodies, decode_command((frozen / STAGED).read_bytes())])
    missing = fields.with_defaults(fields.DURABLE) - used - fields.unusable()
    assert missing == set(), "let tests/compat/generate.py use these fields"
    kinds = {frame[4:5] for frame in frames(copied).values()}
    assert kinds == set(sample.KINDS), "a kind of frame is missing"
    assert any(frame.startswith(ENDED) for frame in frames(copied).values())


# --- what is done with a location


@each_sample
def test_maintenance_leaves_what_is_read(frozen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "location"
    shutil.copytree(frozen / "location", directory)
    told, at = expected(frozen), ["--dir", str(directory)]
    assert main(["maintain", "run", "--once", *at]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["merges_applied"] > 0
    assert done["gc_entries_truncated"] > 0
    assert main(["maintain", "gc", "--once", *at]) == 0
    assert main(["maintain", "sweep", *at]) == 0
    with closing(open_location(f"persist://{directory}")) as location:
        found = list(verify_shards(location, told.contents, Depth(deep=True)))
        assert {fault for shard in found for fault in shard.faults} == set(), "every part that is left can be read"
    with persist.connect(f"persist://{directory}", collect=False) as client:
        assert sample.contents(client) == told.contents
        for write in told.writes:
            assert write.again(client) == write.answer, write


@each_sample
def test_a_shard_of_a_frozen_location_is_exported_and_imported_as_it_was(
    frozen: Path, copied: Location, tmp_path: Path
) -> None:
    told = expected(frozen)
    with closing(open_location(f"persist://{tmp_path}/imported")) as location:
        for name in told.contents:
            file = read_file(json.dumps(export_state(copied, name)).encode())
            import_state(location, file, name, copied.blob, keeps_policies=True)
        assert sample.contents(client_of(location)) == told.contents
        found = list(verify_shards(location, location.all_names(with_dropped=False), Depth(deep=True)))
        assert {fault for shard in found for fault in shard.faults} == set()


@each_sample
def test_a_backup_of_a_frozen_location_is_restored_as_it_was(frozen: Path, copied: Location, tmp_path: Path) -> None:
    """Into a new location, and one shard under another name beside itself."""
    told = expected(frozen)
    store = BackupStore(open_blob(f"file://{tmp_path}/backups"), copied.clock, copied.ids)
    backup = back_up(copied, store, BackupRequest(consistent=UPPER))
    with closing(open_location(f"persist://{tmp_path}/restored")) as location:
        restore(store, backup, location, RestoreRequest(keeps_policies=True))
        client = client_of(location)
        assert sample.contents(client) == told.contents
        if told.writes:
            assert sample.attributes(client) == told.attributes
        for name in told.contents:
            restore(store, backup, location, RestoreRequest(names=(name,), as_name="renamed." + name.replace("/", ".")))
        again = sample.contents(client)
        for name, rows in told.contents.items():
            assert again["renamed." + name.replace("/", ".")] == rows
        found = list(verify_shards(location, location.all_names(with_dropped=False), Depth(deep=True)))
        assert {fault for shard in found for fault in shard.faults} == set()
        assert len(found) == 2 * len(told.contents)
