"""Tokens: who gets in, to what, for how long."""

from __future__ import annotations

import argparse
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from persist.core.errors import Forbidden, InvalidUsage, Unauthorized
from rpc.auth import Principal, Tokens, mint
from rpc.cli.token import add_arguments
from rpc.tls import LOOK_AGAIN_S, Peer


class File:
    """A tokens file and a clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 1_000_000.0
        self.entries: list[dict[str, Any]] = []

    def add(self, name: str, *scopes: str, **more: Any) -> str:
        token, digest = mint(name)
        self.entries.append({"id": name, "sha256": digest, "scopes": list(scopes), **more})
        self.write()
        return token

    def write(self) -> None:
        self.path.write_text(json.dumps({"tokens": self.entries}))
        self.now += LOOK_AGAIN_S

    def open_for(self, *scopes: str) -> Principal:
        token = self.add("one", *scopes)
        return self.open().principal(f"Bearer {token}")

    def open(self) -> Tokens:
        return Tokens(str(self.path), now_s=lambda: self.now)


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "tokens.json")


def test_a_known_token_gets_in(file: File) -> None:
    token = file.add("etl", "write")
    principal = file.open().principal(f"Bearer {token}")
    assert principal.name == "etl"
    principal.require("read", "any")
    principal.require("write", "any")
    with pytest.raises(Forbidden, match="no scope 'admin'"):
        principal.require("admin")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer pt_etl_" + "x" * 43, "Bearer \x00"]
)
def test_everything_else_does_not(file: File, header: str | None) -> None:
    file.add("etl", "read")
    with pytest.raises(Unauthorized):
        file.open().principal(header)


def test_an_unknown_id_and_a_wrong_secret_look_the_same(file: File) -> None:
    token = file.add("etl", "read")
    tokens = file.open()
    said = set()
    for wrong in (token[:-1] + ("a" if token[-1] != "a" else "b"), token.replace("etl", "other")):
        with pytest.raises(Unauthorized) as caught:
            tokens.principal(f"Bearer {wrong}")
        said.add(str(caught.value))
        assert wrong not in str(caught.value)
    assert len(said) == 1


def test_prefixes_limit_the_shards(file: File) -> None:
    token = file.add("eu", "read", prefixes=["eu/", "shared"])
    principal = file.open().principal(f"Bearer {token}")
    principal.require("read", "eu/orders")
    principal.require("read", "shared-rates")
    with pytest.raises(Forbidden, match="'us/orders'"):
        principal.require("read", "us/orders")


def test_a_token_ends_when_it_says(file: File) -> None:
    token = file.add("short", "read", expires="1970-01-12T13:46:50+00:00")
    tokens = file.open()
    tokens.principal(f"Bearer {token}")
    file.now = 1_000_010.0
    with pytest.raises(Unauthorized, match="'short' has expired"):
        tokens.principal(f"Bearer {token}")


def test_tokens_and_certificates_rotate_without_a_restart(file: File) -> None:
    old = file.add("old", "read", certificate="DNS:etl.test")
    tokens, peer = file.open(), Peer(frozenset({"DNS:etl.test"}), 2e6)
    new = file.add("new", "read")
    tokens.principal(f"Bearer {new}")
    for header, shown in ((f"Bearer {old}", None), (None, peer)):
        tokens.principal(header, shown)
    file.entries = [entry for entry in file.entries if entry["id"] == "new"]
    file.write()
    for header, shown in ((f"Bearer {old}", None), (None, peer)):
        with pytest.raises(Unauthorized):
            tokens.principal(header, shown)


def test_a_file_that_cannot_be_opened_for_now_is_read_again(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no descriptor was free everybody was locked out, until somebody touched the file."""
    token = file.add("etl", "read")
    tokens = file.open()
    later = file.add("later", "read")

    def none_free(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("persist.client.arguments.opens_regular", none_free)
        file.now += LOOK_AGAIN_S
        tokens.principal(f"Bearer {token}")
    file.now += LOOK_AGAIN_S
    for one in (token, later):
        tokens.principal(f"Bearer {one}")


def test_a_file_that_was_away_and_comes_back_damaged_lets_nobody_in(file: File) -> None:
    """That was taken for the start: every request was told InvalidUsage with the path of the file."""
    token = file.add("etl", "read")
    tokens = file.open()
    file.path.unlink()
    for content in (None, "{", "[" * 100_000):
        if content is not None:
            file.path.write_text(content)
        file.now += LOOK_AGAIN_S
        for header in (None, f"Bearer {token}"):
            with pytest.raises(Unauthorized) as caught:
                tokens.principal(header)
            assert file.path.name not in str(caught.value)
    file.write()
    tokens.principal(f"Bearer {token}")


@pytest.mark.parametrize("content", [
    "[" * 100_000,
    "",
    "[]",
    '{"tokens": 1}',
    '{"tokens": [{}]}',
    '{"tokens": [], "tokens": []}',
    '{"tokens": [{"id": "a", "sha256": "%s", "scopes": ["read"], "scopes": ["admin"]}]}' % ("0" * 64),
    '{"tokens": [{"id": "a", "sha256": "00", "scopes": ["read"]}]}',
    '{"tokens": [{"id": "a", "sha256": "%s", "scopes": []}]}' % ("0" * 64),
    '{"tokens": [{"id": "a", "sha256": "%s", "scopes": ["root"]}]}' % ("0" * 64),
    '{"tokens": [{"id": "a", "sha256": "%s", "scopes": ["read"], "prefixes": [""]}]}' % ("0" * 64),
    '{"tokens": [{"id": "a", "sha256": "%s", "scopes": ["read"], "expires": "soon"}]}' % ("0" * 64),
    '{"tokens": [{"id": "a", "certificate": "etl", "scopes": ["read"]}]}',
    '{"tokens": [{"id": "a", "certificate": ["DNS:etl"], "scopes": ["read"]}]}',
    '{"tokens": [{"id": "a", "certificate": "DNS:etl", "sha256": "00", "scopes": ["read"]}]}',
    '{"tokens": [{"id": "a", "certificate": "DNS:a", "scopes": ["read"]},'
    ' {"id": "b", "certificate": "DNS:A", "scopes": ["read"]}]}',
])  # fmt: skip
def test_a_file_that_cannot_be_read_stops_the_start(file: File, content: str) -> None:
    file.path.write_text(content)
    with pytest.raises(InvalidUsage, match=r"tokens\.json"):
        file.open()


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o664])
def test_a_file_that_others_may_write_lets_nobody_in(file: File, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    """A22: it was taken without a word, and whoever wrote to it had a token of every scope."""
    token = file.add("etl", "read")
    tokens = file.open()
    tokens.principal(f"Bearer {token}")
    file.path.chmod(mode)
    file.now += LOOK_AGAIN_S
    with pytest.raises(Unauthorized):
        tokens.principal(f"Bearer {token}")
    assert f"has the mode {mode:04o}" in caplog.text
    with pytest.raises(InvalidUsage, match="chmod go-w"):
        file.open()
    with pytest.raises(InvalidUsage, match="chmod go-w"):
        typed("create", "another", "--file", str(file.path))
    file.path.chmod(0o644)
    file.now += LOOK_AGAIN_S
    tokens.principal(f"Bearer {token}")


def test_a_pipe_or_a_device_in_its_place_lets_nobody_in_and_holds_nobody_up(file: File) -> None:
    """A22: opening a pipe waited for who writes to it, and the event loop with it."""
    token = file.add("etl", "read")
    tokens = file.open()
    file.path.unlink()
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir):
        make(file.path)
        file.now += LOOK_AGAIN_S
        with pytest.raises(Unauthorized):
            tokens.principal(f"Bearer {token}")
        with pytest.raises(InvalidUsage, match="cannot be read"):
            file.open()
        with pytest.raises(InvalidUsage, match="cannot be read"):
            typed("list", "--file", str(file.path))
        file.path.rmdir() if file.path.is_dir() else file.path.unlink()
    file.write()
    tokens.principal(f"Bearer {token}")


def test_a_certificate_stands_for_a_token(file: File) -> None:
    file.add("etl", "write", prefixes=["eu/"], certificate="DNS:ETL.test")
    file.entries += [
        {"id": "spiffe", "certificate": "URI:spiffe://x/etl", "scopes": ["read"]},
        {"id": "short", "certificate": "DNS:short.test", "scopes": ["read"], "expires": "1970-01-12"},
    ]
    file.write()
    tokens = file.open()

    def named(*names: str, until_s: float = 2e6) -> Peer:
        return Peer(frozenset(names), until_s)

    found = tokens.principal(None, named("DNS:etl.test", "DNS:other.test"))
    assert (found.name, found.prefixes, "write" in found.scopes) == ("etl", ("eu/",), True)
    assert tokens.principal(None, named("URI:spiffe://x/etl")).scopes == {"read"}
    for peer, why in (
        (named("DNS:other.test"), "is unknown"),
        (named(), "is unknown"),
        (named("DNS:etl.test", "URI:spiffe://x/etl"), "several tokens"),
        (named("DNS:etl.test", until_s=file.now), "has expired; connect"),
        (named("DNS:short.test"), "'short' has expired"),
        (None, "requires a token"),
    ):
        with pytest.raises(Unauthorized, match=why):
            tokens.principal(None, peer)


def test_a_token_that_is_sent_goes_before_a_certificate(file: File) -> None:
    token = file.add("etl", "write", certificate="DNS:etl.test")
    reader = file.add("reader", "read")
    tokens, peer = file.open(), Peer(frozenset({"DNS:etl.test"}), 2e6)
    assert tokens.principal(f"Bearer {reader}", peer).name == "reader"
    assert tokens.principal(f"Bearer {token}").name == "etl"
    with pytest.raises(Unauthorized):
        tokens.principal("Bearer pt_etl_" + "x" * 43, peer)


def test_an_entry_without_a_hash_is_no_token(file: File) -> None:
    """Whatever is sent: zeros are what an entry that is not known is compared with."""
    file.entries = [{"id": "etl", "certificate": "DNS:etl.test", "scopes": ["read"]}]
    file.write()
    with pytest.raises(Unauthorized):
        file.open().principal("Bearer pt_etl_" + "x" * 43)


def test_a_certificate_is_written_into_the_file(file: File, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--file", str(file.path), "--scope", "write", "--certificate", "DNS:etl.test"]
    assert typed("create", "etl", *words) == 0
    assert capsys.readouterr().out == "DNS:etl.test\n"
    assert file.open().principal(None, Peer(frozenset({"DNS:etl.test"}), 2e6)).name == "etl"
    assert typed("list", "--file", str(file.path)) == 0
    assert json.loads(capsys.readouterr().out)["certificate"] == "DNS:etl.test"
    with pytest.raises(InvalidUsage, match="contains a certificate twice"):
        typed("create", "again", *words)
    with pytest.raises(InvalidUsage, match="--certificate is DNS"):
        typed("create", "other", "--file", str(file.path), "--certificate", "etl.test")


def typed(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(words)
    return int(arguments.run(arguments))


@pytest.mark.parametrize(("scopes", "opened"), [
    (["read"], {"read"}),
    (["write"], {"read", "write"}),
    (["manage"], {"read", "write", "manage"}),
    (["maintain"], {"read", "maintain"}),
    (["write", "maintain"], {"read", "write", "maintain"}),
    (["admin"], {"read", "write", "manage", "maintain", "admin"}),
])  # fmt: skip
def test_a_scope_opens_those_that_it_includes(file: File, scopes: list[str], opened: set[str]) -> None:
    assert file.open_for(*scopes).scopes == opened
