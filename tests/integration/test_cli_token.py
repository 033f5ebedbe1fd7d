"""`persist token`: tokens are minted, listed and revoked, and what cannot be done changes nothing."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import persist
from blob import private_files
from persist.core.errors import Unauthorized
from rpc.cli.program import main
from tests.support.server import Server
from tests.support.waiting import wait_until

FILE = ["--file", "tokens.json"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(private_files, "LOCK_S", 0.1)
    yield
    while HELD:
        os.close(HELD.pop())


def token(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["token", *words, *FILE]) == 0
    return capsys.readouterr().out.strip()


def is_let_in(url: str, bearer: str) -> bool:
    try:
        with persist.connect(url, token=bearer) as client:
            return client.shards(prefix="eu/") == []
    except Unauthorized:
        return False


def test_a_token_is_listed_without_its_hash_and_revoked_while_a_server_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    etl = token(capsys, "create", "etl", "--scope", "write", "--prefix", "eu/", "--expires", "2099-01-01")
    other = token(capsys, "create", "other")
    assert [json.loads(line) for line in token(capsys, "list").splitlines()] == [
        {"id": "etl", "scopes": ["write"], "prefixes": ["eu/"], "expires": "2099-01-01", "expired": False},
        {"id": "other", "scopes": ["read"], "prefixes": None, "expires": None, "expired": False},
    ]
    with Server(tmp_path / "data", "--tokens", "tokens.json") as server:
        assert is_let_in(server.url, etl)
        assert token(capsys, "revoke", "etl") == ""
        wait_until(lambda: not is_let_in(server.url, etl), "the server has read the file again")
        with persist.connect(server.url, token=other) as client:
            assert client.shards() == []


def of_content(content: str, *words: str) -> Callable[[], list[str]]:
    def typed() -> list[str]:
        Path("tokens.json").write_text(content)
        return [*words, *FILE]

    return typed


def held() -> list[str]:
    descriptor = os.open(".tokens.json.lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # until the process ends, or until the fixture closes it
    HELD.append(descriptor)
    return ["create", "more", *FILE]


def open_to_group() -> list[str]:
    Path("tokens.json").chmod(0o620)
    return ["create", "more", *FILE]


def piped() -> list[str]:
    os.mkfifo("pipe")
    return ["create", "more", "--file", "pipe"]


HELD: list[int] = []
CERTIFIED = json.dumps({"tokens": [{"id": "a", "certificate": "DNS:etl", "scopes": ["read"]}]})
EMPTY_PREFIX = json.dumps({"tokens": [{"id": "a", "sha256": "00" * 32, "scopes": ["read"], "prefixes": [""]}]})
WRONG = {
    "an id that is not 1 to 64 letters, digits and `-`": lambda: ["create", "e_t l", *FILE],
    "an id that the file has already": lambda: ["create", "etl", *FILE],
    "`revoke` of an id that the file does not have": lambda: ["revoke", "another", *FILE],
    "`list` of a file that is not there": lambda: ["list", "--file", "no.json"],
    "`--prefix` that is empty": lambda: ["create", "all", "--prefix", "", *FILE],
    "`--expires` that is no date, or past": lambda: ["create", "late", "--expires", "2000-01-01", *FILE],
    "`--certificate` that is no name as below": lambda: ["create", "other", "--certificate", "etl.internal", *FILE],
    "`--certificate` that the file has already": of_content(CERTIFIED, "create", "other", "--certificate", "DNS:etl"),
    "a file that cannot be read, or holds no tokens": of_content("[]", "list"),
    "a file that its group, or everybody, may write": open_to_group,
    "a pipe, a device or a directory in its place": piped,
    "`list` of a file that a server would refuse": of_content(EMPTY_PREFIX, "list"),
    "a change after which a server would refuse the file": of_content(EMPTY_PREFIX, "create", "more"),
    "a file that another `persist token` has held for 10 s": held,
}


def contents() -> dict[str, bytes]:
    made = (".tokens.json.lock", ".pipe.lock")
    return {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file() and path.name not in made}


@pytest.mark.parametrize("given", WRONG)
def test_wrong_words_change_nothing(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    token(capsys, "create", "etl")
    words = WRONG[given]()
    before = contents()
    assert main(["token", *words]) == 1
    assert capsys.readouterr().err.startswith("persist token: ")
    assert contents() == before
