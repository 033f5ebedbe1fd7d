"""The commands about history, rows that go, and copies answer the same through a server as in a directory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist.core.errors import InvalidUsage
from persist.core.shard_settings import DEFAULT_HISTORY, history_ms
from persist.inspect.readonly_location import prefix_of
from rpc.cli.program import main
from tests.support.server import Server

SCHEMA = pa.schema([("id", pa.int64()), ("n", pa.int64())])
Command = Callable[..., list[dict[str, Any]]]


@pytest.fixture(params=["directory", "server"])
def command(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Runs a command on a location with the shard `orders`; what it printed."""
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    with persist.connect(f"persist://{data}") as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        for n in range(4):
            shard.insert([{"id": n, "n": 0}])

    def run(where: list[str], *words: str, code: int = 0) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main([*words, *where]) == code, capsys.readouterr().err
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    if request.param == "directory":
        yield lambda *words, **code: run(["--dir", str(data)], *words, **code)
        return
    with Server(data) as server:
        yield lambda *words, **code: run(["--url", server.url], *words, **code)


def test_a_day_of_an_operator(command: Command) -> None:
    assert command("tag", "set", "orders", "eom", "--at", "1") == [
        {"shard": "orders", "tag": "eom", "time": 1, "until": None}
    ]
    assert command("tag", "remove", "orders", "eom") == []
    [kept] = command("history", "orders", "--keep", "30d", "--forget", "1")
    assert (kept["history"], kept["since"]) == ("30d", [1])
    *commits, _ = command("history", "orders", "--commits", "2")
    assert [one["operation"] for one in commits] == ["forget", "set_settings"]
    [cut] = command("retention", "cut", "orders")
    Path("cut.json").write_text(json.dumps(cut))
    assert command("retention", "truncate", "--cut", "cut.json", "--dry-run")[0]["shard"] == "orders"
    [made] = command("clone", "orders", "copied", "--at", "3")
    assert (made["shard"], made["source"], made["upper"]) == ("copied", "orders", [4])
    [gone] = command("retention", "truncate", "orders", "--before", "2")
    assert gone["removed"] == 2
    [done] = command("restore", "orders", "--at", "3")
    assert done["added"] == 2
    [policy] = command("retention", "set", "orders", "--rows", "3")
    assert policy["policy"]["rows"] == 3
    assert command("retention", "show", "orders")[0]["policy"]["rows"] == 3
    assert command("retention", "run", "orders", "--dry-run")[0]["shard"] == "orders"
    Path("keys.json").write_text("[[3]]")
    [erasure] = command("erase", "start", "orders", "--keys", "keys.json", "--reason", "dsr-1")
    assert command("erase", "status", "orders", "--id", erasure["id"], code=3)[0]["reason"] == "dsr-1"
    assert command("erase", "status", "orders", "--before", "2", code=3)[0]["phase"] != "erased"


def test_what_needs_the_stores_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tmp_path / "data") as server:
        with persist.connect(server.url) as client:
            client.create_shard("orders", SCHEMA, ["id"]).insert([{"id": 1, "n": 1}])
        assert main(["history", "orders", "--repair-clock", "--url", server.url]) == 1
        assert "--repair-clock requires" in capsys.readouterr().err
        assert main(["history", "orders", "--forget", "1", "--keep", "1d", "--url", server.url]) == 1
        assert "beyond the latest complete time" in capsys.readouterr().err
        with persist.connect(server.url) as client:
            assert client.shard("orders").settings.history_ms == 7 * 24 * 3_600_000


# --- what a newcomer met who looked into shards from the shell


@pytest.fixture
def where(tmp_path: Path) -> list[str]:
    return ["--dir", str(tmp_path / "data")]


def test_a_shard_that_a_command_makes_keeps_history_as_one_of_python_does(tmp_path: Path, where: list[str]) -> None:
    """It had no setting: its history went as soon as a reader let go of it."""
    (tmp_path / "rows.csv").write_text("id\n1\n")
    assert main(["create", "made", "--schema", "id int64", "--key", "id", *where]) == 0
    assert main(["import", "imported", str(tmp_path / "rows.csv"), "--create", "--key", "id", *where]) == 0
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        for name in ("made", "imported"):
            assert client.shard(name).settings.history_ms == history_ms(DEFAULT_HISTORY, "history")
        shard = client.shard("imported")
        for number in range(3):
            shard.insert([{"id": number}])
        shard.critical_reader("job").downgrade_since(3)
        assert shard.snapshot(0).to_arrow().num_rows == 1


@pytest.mark.parametrize("pattern", ["h!", "h!*", "!", "[a!"])
def test_a_pattern_with_an_exclamation_mark_outside_of_brackets_is_none(pattern: str) -> None:
    """No name has one, and nothing was found for it."""
    with pytest.raises(InvalidUsage, match="not a pattern"):
        prefix_of(pattern)
    assert prefix_of("h[!ab]*") == "h"


# --- what is wrong with the arguments of a command is one sentence, before anything is done or printed


HUGE = "9" * 30
WRONG = [
    (["maintain", "run", "--no-gc", "--nice", HUGE], f"--nice {HUGE} is not possible"),
    (["maintain", "run", "--no-gc", "--rate", "nan"], "--rate is 'nan'"),
    (["maintain", "run", "--no-gc", "--engine", "spark", "--rate", "10MiB", "--once"], "--rate"),
    (["maintain", "gc", "--concurrency", "0"], "--concurrency is 0"),
    (["maintain", "run", "--memory", "0"], "--memory is '0'"),
    (["maintain", "run", "--part-size", f"{HUGE}GiB"], "--part-size is "),
    (["maintain", "sweep", "--age", "6m"], "a blob that is 0.1 hours old"),
    (["maintain", "sweep", "--age", "nan"], "--age is 'nan'"),
    (["serve", "--history", "rubbish"], "history is 'rubbish'"),
    (["serve", "--tls-certificate", "c.pem", "--tls-key", "k.pem"], "the TLS files c.pem and k.pem cannot be used"),
    (
        ["token", "create", "a", "--file", "missing/tokens.json"],
        "the tokens file missing/tokens.json cannot be written",
    ),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        for number in range(3):
            client.create_shard(f"s{number}", pa.schema([("id", pa.int64())]), ["id"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(row[0])[:40] for row in WRONG])
def test_a_wrong_argument_is_told_in_a_sentence(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    where = [] if arguments[0] == "token" else ["--dir", "data"]
    assert main([*arguments, *where]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"persist {arguments[0]}: {said}")
    assert len(told.err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--tokens", "nope.json"], ["--port", "99999"], ["--tls-key", "nope.pem"]])
def test_a_server_that_cannot_start_leaves_no_directory(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *arguments]) == 1
    assert not list(tmp_path.iterdir())


# --- commands start soon: none but `serve` loads what only a server needs, which took a fifth of their start


LOAD = """
import sys
from rpc.cli.program import COMMANDS, main, parser_for

def check(name):
    loaded = {"fastapi", "pydantic", "starlette", "uvicorn"} & sys.modules.keys()
    assert not loaded, f"{name} loads {sorted(loaded)}"

for name in sorted(COMMANDS.keys() - {"serve"}):
    parser_for(name)
    check(name)
assert main(["cat", "orders", "--dir", sys.argv[1]]) == 0
check("a command that reads rows")
"""


def test_no_command_but_serve_loads_the_framework_of_the_server(tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}") as client:
        client.create_shard("orders", pa.schema([("id", pa.int64())]), ["id"]).insert([{"id": 1}])
    ran = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, '{"id":1}\n'), ran.stderr


# --- `persist history`: settings and wall clocks of a shard


COLUMNS = pa.schema([("id", pa.string())])


@pytest.fixture
def directory(tmp_path: Path) -> str:
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        shard = client.create_shard("orders", COLUMNS, ["id"])
        for key in "abc":
            shard.insert([{"id": key}])
    return str(tmp_path / "data")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["history", "orders", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_tells_which_time_an_instant_names_and_back(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, _ = told(capsys, "--dir", directory, "--at", "2020-01-01T00:00:00+01:00")
    assert before == {"at": "2020-01-01T00:00:00+01:00", "frontier": [0]}
    shown, _ = told(capsys, "--dir", directory, "--when", "2")
    assert shown["time"] == 2
    assert shown["timestamp"].endswith(".000Z")


def test_a_clock_that_is_right_needs_no_repair(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    repaired, found = told(capsys, "--dir", directory, "--repair-clock")
    assert repaired["taken_back_from"] is None
    assert repaired["settled"] <= found["settled"]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--keep", "3d", "--forget", "99"],
        ["--forget", "2", "--keep", "long"],
        ["--keep", "3d", "--at", "yesterday"],
        ["--keep", "3d", "--commits", "0"],
        ["--keep", "3d", "--before", "7.0"],
    ],
    ids=str,
)
def test_of_several_arguments_one_that_is_wrong_leaves_all_undone(
    directory: str, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    assert main(["history", "orders", "--dir", directory, *wrong]) == 1
    capsys.readouterr()
    [found] = told(capsys, "--dir", directory)
    assert (found["history"], found["version"], found["since"]) == ("1w", 1, [0])
