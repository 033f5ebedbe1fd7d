"""What is wrong with the arguments of a command is one sentence, before anything is done or printed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import persist
from rpc.cli.program import main

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
    (["serve", "--tls-certificate", "c.pem", "--tls-key", "k.pem"], "the TLS files c.pem and k.pem cannot be used"),
    (["token", "a", "--file", "missing/tokens.json"], "the tokens file missing/tokens.json cannot be written"),
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


def test_a_file_of_authorities_that_is_missing_is_named() -> None:
    with pytest.raises(persist.InvalidUsage, match=r"ca_file 'missing\.pem' cannot be used: No such file"):
        persist.connect("https://127.0.0.1:1", ca_file="missing.pem")


@pytest.mark.parametrize("arguments", [["--tokens", "nope.json"], ["--port", "99999"], ["--tls-key", "nope.pem"]])
def test_a_server_that_cannot_start_leaves_no_directory(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *arguments]) == 1
    assert not list(tmp_path.iterdir())
