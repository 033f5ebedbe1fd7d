"""Bad input of commands, on the stores and through a server: nothing is written."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persist.core.errors import PersistError
from persist.core.ids import token_of_key
from rpc.cli.program import parser_for
from tests.support.examples import thinned
from tests.support.typed import KINDS, Place, place_of

NOT_THERE = "there is no such place"

# What is typed for each case: the words, and the content of the file `f.csv`, `f.ndjson` and so on that they name.
Case = tuple[str, bytes | None]
CSV = b"id,state\n9,new\n"
CASES: dict[tuple[str, str], Case] = {
    ("any", "an option that the command has not"): ("cat orders --nothing", None),
    ("any", "a shard that is not there"): ("cat missing", None),
    ("any", "a directory that is not there"): (f"cat orders {NOT_THERE} --dir missing", None),
    ("any", "a server and a directory"): (f"cat orders {NOT_THERE} --url http://127.0.0.1:1 --dir data", None),
    ("any", "a server by something else than http(s)"): (f"cat orders {NOT_THERE} --url persist:///x", None),
    ("any", "a file of authorities without a server"): (f"cat orders {NOT_THERE} --ca-file ca.pem", None),
    ("create", "columns that are told twice, or not at all"): ("create new --key id", None),
    ("create", "no key"): ("create new --schema id_int64", None),
    ("create", "a file of a schema that cannot be read"): ("create new --schema-file missing.json --key id", None),
    ("create", "the name of a shard with other columns"): ("create orders --schema id_int64 --key id", None),
    ("import", "a file that is not there"): ("import orders missing.csv", None),
    ("import", "a directory in the place of a file"): ("import orders . --format csv", None),
    ("import", "CSV without a line of names"): ("import orders f.csv", b""),
    ("import", "CSV with a column twice"): ("import orders f.csv", b"id,id\n1,2\n"),
    ("import", "a file whose name tells no format"): ("import orders f.txt", CSV),
    ("import", "standard input without a format"): ("import orders -", None),
    ("import", "a file of another format than its name tells"): ("import orders f.parquet", CSV),
    ("import", "a file without the key"): ("import orders f.csv", b"state\nnew\n"),
    ("import", "`--columns` that the file has not"): ("import orders f.csv --columns id,state", b"id\n9\n"),
    ("import", "`--null` for another format than CSV"): ("import orders f.ndjson --null NA", b'{"id":9}\n'),
    ("import", "Parquet with a column of another type"): ("import orders other.parquet", None),
    ("import", "rows with `__time`"): ("import orders f.csv", b"id,state,__time\n9,new,7\n"),
    ("import", "rows with `__diff`, to be upserted"): ("import orders f.csv --upsert", b"id,state,__diff\n9,new,2\n"),
    ("import", "a key twice, to be upserted"): ("import orders f.csv --upsert", b"id,state\n9,new\n9,old\n"),
    ("import", "`--create` without a key"): ("import new f.csv --create", CSV),
    ("import", "`--create` with another key than the shard has"): ("import orders f.csv --create --key state", CSV),
    ("import", "`--overwrite` by several files"): ("import orders f.csv f.csv --overwrite", CSV),
    ("import", "a token for several commits"): ("import orders f.csv f.csv --token one", CSV),
    ("import", "a token that was used for other rows"): ("import orders f.csv --token used", CSV),
    ("import", "`--upsert` and `--overwrite`"): ("import orders f.csv --upsert --overwrite", CSV),
    ("cat", "a time that is not complete"): ("cat orders --as-of 99", None),
    ("cat", "a time that was forgotten"): ("cat orders --as-of 0", None),
    ("cat", "`--count` of some columns"): ("cat orders --count --columns id", None),
    ("tail", "a number of times and a time"): ("tail orders -n 1 --as-of 1", None),
    ("tail", "a number of times below zero"): ("tail orders -n -1", None),
    ("diff", "a time that is none"): ("diff orders now then", None),
    ("export", "a file whose name tells no format"): ("export orders rows.txt", None),
    ("export", "a directory that is not there"): ("export orders missing/rows.csv", None),
    ("drop", "no `--yes`, where nobody can be asked"): ("drop orders", None),
    ("shards", "names alone, and more than names"): ("shards orders --names", None),
}
OTHER_KINDS: dict[tuple[str, str], tuple[str | None, int]] = {
    ("any", "an option that the command has not"): (None, 2),
    ("any", "a shard that is not there"): ("unknown_shard", 1),
    ("create", "the name of a shard with other columns"): ("shard_exists", 1),
    ("import", "a token that was used for other rows"): ("token_reused", 1),
    ("import", "`--upsert` and `--overwrite`"): (None, 2),
    ("cat", "a time that is not complete"): ("not_complete", 1),
    ("cat", "a time that was forgotten"): ("not_readable", 1),
    ("drop", "no `--yes`, where nobody can be asked"): (None, 2),
}
"""The kind and the exit code of the cases that are not `invalid_usage` and 1."""


@pytest.fixture(scope="module", params=thinned(KINDS, 2))
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place_of(request.param, tmp_path_factory.mktemp(request.param)) as found:
        with found.client() as client:
            columns = pa.schema([pa.field("id", pa.int64(), nullable=False), ("state", pa.string())])
            shard = client.create_shard("orders", columns, ["id"])
            shard.insert([{"id": 1, "state": "new"}])
            shard.insert([{"id": 2, "state": "new"}], token=token_of_key("used"))
            shard.forget(1)
        yield found


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CSV)))
    pq.write_table(pa.table({"id": ["a"], "state": ["new"]}), "other.parquet")


@pytest.mark.parametrize(("command", "what"), CASES, ids=lambda text: text[:50])
def test_bad_input_is_one_sentence_of_its_kind_and_writes_nothing(
    place: Place, files: None, command: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, content = CASES[command, what]
    kind, code = OTHER_KINDS.get((command, what), ("invalid_usage", 1))
    words = [word.replace("_", " ") if word.startswith("id_") else word for word in text.replace(NOT_THERE, "").split()]
    words = [word.replace(",id_", ", id ") for word in words]
    if content is not None:
        Path(next(word for word in words if word.startswith("f."))).write_bytes(content)
    scope: tuple[str, ...] = () if NOT_THERE in text or command == "completion" else place.where
    before = contents(place), sorted(Path().iterdir())

    found = Place(scope, place.url).type(capsys, *words)  # type: ignore[arg-type]

    assert (found.code, found.out) == (code, "")
    assert (contents(place), sorted(Path().iterdir())) == before
    if code == 1:
        assert len(found.err.splitlines()) == 1
        assert found.err.startswith(f"persist {words[0]}: ")
        assert kind_of([*words, *scope]) == kind
    else:
        assert kind is None


def contents(place: Place) -> Any:
    with place.client() as client:
        shard = client.shard("orders")
        return client.shards(), shard.upper(), shard.snapshot().to_arrow().to_pylist()


def kind_of(words: list[str]) -> str:
    """The kind of the error that a command raises."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(CSV))
    arguments = parser_for(words[0]).parse_args(words)
    with pytest.raises(PersistError) as raised:
        arguments.run(arguments)
    return raised.value.kind
