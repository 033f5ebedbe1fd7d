"""Commands that only look, at files, servers and values that are hostile: one line, and nothing is changed."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from blob import BlobExists, BlobNotFound, open_blob
from persist.cli import inspect
from persist.commit.location import open_location
from rpc.app import create_app
from rpc.auth import Principal
from rpc.cli.program import main
from rpc.settings import ServerSettings
from tests.support.answers import Answers
from tests.support.inspected import PART, ROLLUP, copied, everything

SCHEMA = pa.schema([("id", pa.int64())])
LOOKS = [["inspect", "usage"], ["check", "--quick"]]
SECRET = "pt_admin_SECRETSECRETSECRETSECRET"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return copied(tmp_path / "location")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PERSIST_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A location as a crash leaves it: what was committed is in the write-ahead log alone."""
    with persist.connect(f"persist://{tmp_path}/home", collect=False) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        for number in range(10):
            shard.insert([{"id": number}])
        return Path(shutil.copytree(tmp_path / "home", tmp_path / "crashed"))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1, told.err
    return told.err


# --- the log's file


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("words", [*LOOKS, ["check"], ["cat", "orders"]], ids=" ".join)
def test_a_look_deleted_the_write_ahead_log_of_an_empty_file(
    words: list[str], index: bool, crashed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (crashed / "consensus.db").write_bytes(b"")
    if not index:
        (crashed / "consensus.db-shm").unlink()
    before = everything(crashed)
    assert main([*words, "--dir", str(crashed)]) != 0
    assert "SQLite would delete its write-ahead log" in said(capsys)
    assert everything(crashed) == before


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_a_look_deleted_the_rollback_journal_of_an_empty_file(
    words: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "consensus.db").write_bytes(b"")
    (place / "consensus.db-journal").write_bytes(b"what there was")
    before = everything(place)
    assert main([*words, "--dir", str(place)]) == 3
    assert "is empty beside a rollback journal" in said(capsys)
    assert everything(place) == before


def test_a_look_read_past_a_rollback_journal(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a transaction had written that a crash has cut off was taken for committed."""
    assert main(["inspect", "log", "orders", "--dir", str(place)]) == 0
    sound = capsys.readouterr().out
    with closing(sqlite3.connect(place / "consensus.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN")
        connection.execute("UPDATE consensus_log SET data = zeroblob(length(data))")
        shutil.copytree(place, tmp_path / "cut-off")
    cut_off = tmp_path / "cut-off"
    assert (cut_off / "consensus.db-journal").stat().st_size > 512
    before = everything(cut_off)
    assert main(["inspect", "log", "orders", "--dir", str(cut_off)]) == 0
    assert capsys.readouterr().out == sound
    assert everything(cut_off) == before


def test_a_full_temporary_directory_ended_in_a_traceback_and_half_a_copy(
    crashed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (crashed / "consensus.db-shm").unlink()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    copied_so_far = []

    def full(source: str, to: str) -> None:
        Path(to).write_bytes(Path(source).read_bytes()[:100])
        copied_so_far.append(to)
        if source.endswith("-wal"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    assert main(["inspect", "usage", "--dir", str(crashed)]) == 3
    assert "must be copied for reading, which failed: No space left on device; set TMPDIR" in said(capsys)
    assert len(copied_so_far) == 2
    assert list((tmp_path / "temporary").iterdir()) == []


# --- what is no file


@pytest.mark.parametrize(
    ("odd", "code"),
    [
        ("persist.json", 1),
        ("consensus.db", 3),
        ("consensus.db-shm", 3),
        ("consensus.db-wal", 3),
        (f"blob/{ROLLUP}", 1),
        (f"blob/{PART}", 1),
    ],
)
def test_a_pipe_in_a_location_hung_a_look(odd: str, code: int, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / odd).unlink(missing_ok=True)
    os.mkfifo(place / odd)
    for words in (["usage"], ["digest", "orders"]):
        main(["inspect", *words, "--dir", str(place)])
    capsys.readouterr()
    command = ["parts", "orders"] if odd.endswith("parquet") else ["state", "orders"] if "blob" in odd else ["usage"]
    assert main(["inspect", *command, "--dir", str(place)]) == code
    told = capsys.readouterr()
    assert any(words in told.out + told.err for words in ("regular file", "is not there", "is missing"))


def test_what_is_no_file_is_no_blob(tmp_path: Path) -> None:
    with closing(open_blob(f"file://{tmp_path}/blob")) as blob:
        blob.put("s/file", b"bytes")
        os.mkfifo(tmp_path / "blob" / "s" / "pipe")
        (tmp_path / "blob" / "s" / "round").symlink_to("circle")
        (tmp_path / "blob" / "s" / "circle").symlink_to("round")
        (tmp_path / "blob" / "s" / "device").symlink_to("/dev/zero")
        assert [stat.key for stat in blob.list("")] == ["s/file"]
        for key in ("s/pipe", "s/circle", "s/device"):
            assert blob.stat(key) is None
            with pytest.raises(BlobNotFound):
                blob.get(key)
            with pytest.raises(BlobNotFound):
                blob.get_range(key, 0, 1)
        with pytest.raises(BlobExists):
            blob.put("s/pipe", b"bytes")


@pytest.mark.parametrize(
    ("marker", "what"),
    [("[" * 60_000, "is not JSON"), ("[" * 200_000, "is not JSON"), ('{"version": 1e400}', "has no format version")],
)
def test_a_marker_of_nested_lists_was_a_traceback(
    marker: str, what: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "persist.json").write_text(marker)
    assert main(["inspect", "usage", "--dir", str(place)]) == 1
    assert f"DAMAGED persist.json is damaged: it {what}" in capsys.readouterr().out
    assert main(["check", "--json", "--dir", str(place)]) == 1
    told = capsys.readouterr()
    findings = {finding["id"]: finding["what"] for finding in json.loads(told.out)["findings"]}
    assert findings["marker-wrong"] == f"persist.json is damaged: it {what}"
    assert "Traceback" not in told.err


# --- servers


FAR = [["inspect", "log", "orders"], ["check", "--quick"]]


@pytest.mark.parametrize("words", FAR, ids=" ".join)
def test_a_redirect_took_the_token_to_another_host(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERSIST_TOKEN", SECRET)
    with closing(Answers(200, b"{}")) as other, closing(Answers(302, b"", location=f"{other.url}/x")) as asked:
        assert main([*words, "--url", asked.url]) == 3
        assert "redirects" in said(capsys)
        assert (len(asked.tokens), other.tokens) == (1, [])


@pytest.mark.parametrize("words", [*FAR, ["cat", "orders"]], ids=" ".join)
@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("http://127.0.0.1:1", f"{SECRET}\n"),
        ("http://127.0.0.1:1", f"{SECRET}é"),
        (f"http://user:{SECRET}@127.0.0.1:1", ""),
        (f"user:{SECRET}@127.0.0.1:1", ""),
        (f"http://127.0.0.1:{SECRET}", ""),
    ],
)
def test_an_error_showed_the_token_or_the_password(
    url: str, token: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERSIST_TOKEN", token)
    assert main([*words, "--url", url]) == (1 if words[0] == "cat" else 2)
    error = said(capsys)
    assert SECRET not in error or url.endswith(SECRET)


@pytest.mark.parametrize("words", FAR, ids=" ".join)
def test_the_url_of_the_environment_was_not_asked(
    words: list[str], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place.rename(tmp_path / "persist-data")
    monkeypatch.chdir(tmp_path)
    with closing(Answers(404, b"")) as asked:
        monkeypatch.setenv("PERSIST_URL", f"http://127.0.0.1:1,{asked.url}")
        assert main(words) == 3
        assert len(asked.paths) == 1
    capsys.readouterr()
    monkeypatch.setenv("PERSIST_DIRECTORY", str(tmp_path))
    assert main(words) == 2
    assert "PERSIST_URL and PERSIST_DIRECTORY are both set" in said(capsys)
    monkeypatch.undo()
    for wrong in (["--dir", ""], ["--ca-file", "x"], ["--url", "https://h", "--ca-file", "/nowhere"]):
        assert main([*words, *wrong]) == 2, wrong
        said(capsys)


ODD_DOCUMENTS = [
    b'{"persist":"inspect"}',
    b'{"persist":"inspect","seqno":null,"about":5,"rows":3,"findings":[1]}',
    b'{"persist":"inspect","seqno":null,"about":null,"rows":[],"findings":[{}]}',
    b'{"persist":"inspect","seqno":null,"about":{"shown":5},"rows":[],"findings":[]}',
    b"[" * 200_000,
    b"garbage]}\n",
    b'{"seqno": 1, "finding": null}\n',
    b'{"seqno": 1, "finding": null, "timestamp": 1, "bytes": 2, "operations": 5, "kinds": [7]}\n',
    b"\xff\xfe",
    b"",
]


@pytest.mark.parametrize("body", ODD_DOCUMENTS, ids=lambda body: str(body[:40]))
def test_an_answer_of_no_server_of_persist_was_a_traceback(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Answers(200, body)) as asked:
        codes = {}
        for words in (["usage"], ["usage", "--json"], ["log", "orders"]):
            codes[" ".join(words)] = main(["inspect", *words, "--url", asked.url])
            error = capsys.readouterr().err
            assert len(error.splitlines()) <= 1
        assert codes["usage"] == 3
        if not body.startswith(b'{"persist"'):
            assert codes["usage --json"] == 3
        assert main(["check", "--quick", "--url", asked.url]) in (2, 3)


def test_rows_of_a_later_build_that_tell_more_were_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"a": 1}, {"b": "two"}, {"a": 3, "c": None}]
    body = {"persist": "inspect", "seqno": None, "about": None, "rows": rows, "findings": []}
    with closing(Answers(200, json.dumps(body).encode())) as asked:
        assert main(["inspect", "usage", "--url", asked.url]) == 0
    assert capsys.readouterr().out == "a  b\n1  -\n-  two\n3  -\n"


# --- what is shown


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31mX\nDAMAGED eu/orders: all is lost\r\u202e"


def test_names_purposes_reasons_and_values_moved_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = pa.schema([("id", pa.int64()), ("a\u202e", pa.string())])
    with persist.connect(f"persist://{tmp_path}/home") as client:
        shard = client.create_shard("orders", schema, ["id"])
        texts = [ESCAPES + os.urandom(40).hex() for _ in range(3000)]
        shard.insert(pa.table([range(3000), texts], schema=schema))
        shard.critical_reader(f"cursor{ESCAPES}")
        with shard.snapshot(purpose=f"purpose{ESCAPES}"):
            shard.erase(where="id = 5", reason=f"because{ESCAPES}")
            at = ["--dir", f"{tmp_path}/home"]
            main(["inspect", "parts", "orders", "--json", *at])
            [key, *_] = [row["key"] for row in json.loads(capsys.readouterr().out)["rows"] if row["key"]]
            whats = [["state"], ["holds"], ["usage"], ["log"], ["state", "--from", "1", "--at", "4"]]
            commands = [["inspect", what, "orders", *more] for what, *more in whats]
            commands += [["inspect", "part", key, "--rows", "2", "--keys"], ["check", "--quick", "--held", "0s"]]
            commands += [["inspect", "state", ESCAPES], ["check", "--quick", ESCAPES]]
            for words in commands:
                main([*words, *at])
                told = capsys.readouterr()
                assert told.out + told.err, words
                assert not set(told.out + told.err) & set("\x1b\x07\r\u202e"), words
                assert not [line for line in told.out.splitlines() if line.startswith("DAMAGED eu/orders")], words


@pytest.mark.parametrize("kind", ["at", "d", "m"])
def test_a_time_beyond_the_years_of_python_was_a_traceback(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    types = {"at": pa.timestamp("us", "UTC"), "d": pa.date32(), "m": pa.map_(pa.string(), pa.binary())}
    schema = pa.schema([("id", pa.int64()), ("v", types[kind]), ("s", pa.large_string())])
    values: dict[str, tuple[Any, Any]] = {
        "at": (pa.array([2**62] * 2000).cast(types["at"]), f"@{2**62}"),
        "d": (pa.array([2**30] * 2000, pa.int32()).cast(types["d"]), f"@{2**30}"),
        "m": (pa.array([[("k", b"\xff\x00")]] * 2000, types["m"]), [["k", "/wA="]]),
    }
    with persist.connect(f"persist://{tmp_path}/home") as client:
        shard = client.create_shard("orders", schema, ["id"])
        shard.insert(pa.table([range(2000), values[kind][0], ["x" * 200] * 2000], schema=schema))
    at = ["--dir", f"{tmp_path}/home"]
    main(["inspect", "parts", "orders", "--json", *at])
    [key] = [row["key"] for row in json.loads(capsys.readouterr().out)["rows"] if row["key"]]
    assert main(["inspect", "part", key, "--keys", *at]) == 0
    capsys.readouterr()
    assert main(["inspect", "part", key, "--rows", "1", "--json", *at]) == 0
    assert json.loads(capsys.readouterr().out)["about"]["shown"][0]["v"] == values[kind][1]


# --- versions and loans


def test_a_part_that_a_clone_alone_names_was_told_to_be_named_by_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    at = ["--dir", str(home)]
    with persist.connect(f"persist://{home}", collect=False) as client:
        shard = client.create_shard("src", SCHEMA, ["id"], history="none")
        for first in (0, 3000):
            shard.insert(pa.table([range(first, first + 3000)], schema=SCHEMA))
        client.clone("src", "copy")
        shard.overwrite(pa.table([[1]], schema=SCHEMA))
        shard.forget(before=shard.upper().element - 1)
        shard.optimize()
    main(["inspect", "parts", "copy", "--json", *at])
    [key, *_] = [row["key"] for row in json.loads(capsys.readouterr().out)["rows"] if row["key"]]
    main(["inspect", "parts", "src", "--json", *at])
    assert key not in capsys.readouterr().out
    assert main(["inspect", "part", key, "--rows", "1", "--json", *at]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["shard"], told["about"]["named"], told["about"]["whole"]) == ("copy", True, True)
    assert len(told["about"]["shown"]) == 1
    (home / "blob" / key).unlink()
    assert main(["inspect", "part", key, *at]) == 1
    assert f"DAMAGED copy: the blob {key} is missing" in capsys.readouterr().out


@contextmanager
def served(home: Path, monkeypatch: pytest.MonkeyPatch, *prefixes: str) -> Iterator[TestClient]:
    """A server that takes everybody for who administers the shards with these prefixes."""
    location = open_location(f"persist://{home}")
    only = Principal("eu", frozenset({"read", "write", "admin"}), prefixes)
    monkeypatch.setattr("rpc.middleware.ANONYMOUS", only)
    with TestClient(create_app(location, ServerSettings()), base_url="http://127.0.0.1") as client:
        yield client


def test_a_token_with_a_prefix_was_told_the_names_of_other_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    with persist.connect(f"persist://{home}") as client:
        for name in ("us/hidden", "eu/orders"):
            client.create_shard(name, SCHEMA, ["id"]).insert(pa.table([range(6000)], schema=SCHEMA))
        client.clone("us/hidden", "eu/clone")
        client.clone("eu/orders", "us/hidden-clone")
    whats = ["holds", "state?whole=true", "state", "parts", "log", "state?from=1&at=3", "digest"]
    with served(home, monkeypatch, "eu/") as http:
        for name in ("eu/orders", "eu/clone"):
            for what in whats:
                answer = http.get(f"/v1/shards/{name}/inspect/{what}")
                assert answer.status_code in (200, 400), (what, answer.text)
                assert "hidden" not in answer.text, what
        answer = http.get("/v1/inspect/usage")
        assert [row["shard"] for row in answer.json()["rows"]] == ["eu/clone", "eu/orders"]
        assert "hidden" not in answer.text
        assert answer.json()["about"]["published"] is None
        assert "hidden" not in http.get("/v1/check?pattern=eu/*&behind=1s").text
        assert http.get("/v1/inspect/usage?pattern=us/*").status_code == 403


def test_one_that_does_not_answer_is_passed_over() -> None:
    with ExitStack() as stack:
        asked = stack.enter_context(closing(Answers(200, b'{"a": 1}')))
        servers = stack.enter_context(closing(inspect.Server(f"http://127.0.0.1:1,{asked.url}", None)))
        assert servers.document("/v1/check") == {"a": 1}
