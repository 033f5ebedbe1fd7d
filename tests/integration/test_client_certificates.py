"""A server that knows clients by their certificates, and takes new certificates of its own while it runs."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist.client.arguments import ClientTls
from persist.commit.clocks_and_ids import SystemClock
from persist.core.errors import Forbidden, InvalidUsage, PersistError, Unauthorized, Unavailable
from persist.regions.region_index import RegionEntry, RegionIndex, open_index, write_index
from rpc.auth import mint
from rpc.cli.program import main
from rpc.settings import ServerSettings
from tests.support.certificates import Authority
from tests.support.server import Server
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.string())])


class Place:
    """A server behind TLS, and what its clients have."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority("ours")
        self.ca = self.authority.file(directory / "ca.pem")
        self.certificate, self.key, self.tokens = (directory / name for name in ("cert.pem", "key.pem", "tokens.json"))
        self.write_certificate()
        self.token, digest = mint("by-token")
        self.entries = [
            {"id": "by-token", "sha256": digest, "scopes": ["read"]},
            {"id": "etl", "certificate": "DNS:etl.test", "scopes": ["write"], "prefixes": ["eu/"]},
        ]
        self.write_tokens()
        self.etl = self.authority.client(directory / "etl.pem", "DNS:etl.test")
        self.stranger = self.authority.client(directory / "stranger.pem", "DNS:stranger.test")
        self.foreign = Authority("theirs").client(directory / "foreign.pem", "DNS:etl.test")

    def write_certificate(self) -> None:
        certificate, key = self.authority.signed("IP:127.0.0.1")
        self.key.write_bytes(key)
        self.certificate.write_bytes(certificate)

    def write_tokens(self) -> None:
        self.tokens.write_text(json.dumps({"tokens": self.entries}))

    def start(self, data: str = "data", *more: str) -> Server:
        """A server over TLS that asks for certificates; `data`: where in the directory its shards are."""
        files = ["--tls-certificate", str(self.certificate), "--tls-key", str(self.key), "--tls-client-ca", self.ca]
        return Server(self.directory / data, *files, "--tokens", str(self.tokens), *more)

    def asked(self, server: Server, certificate: str | None, headers: dict[str, str] | None = None) -> tuple[int, str]:
        """The status of a listing, and the serial number of the certificate that the server has shown."""
        request = urllib.request.Request(f"{server.url}/v1/shards?prefix=eu/", headers=headers or {})
        context = ClientTls(self.ca, certificate).context()
        try:
            with urllib.request.urlopen(request, context=context) as answer:
                return answer.status, answer.fp.raw._sock.getpeercert()["serialNumber"]
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, ""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(place: Place) -> Iterator[Server]:
    with place.start() as server:
        yield server


def test_a_client_writes_by_its_certificate_what_its_entry_allows(place: Place, server: Server) -> None:
    with persist.connect(server.url, ca_file=place.ca, certificate_file=place.etl) as client:
        shard = client.create_shard("eu/orders", SCHEMA, ["id"])
        shard.insert([{"id": "a"}])
        assert shard.snapshot().to_arrow().num_rows == 1
        with pytest.raises(Forbidden, match="'etl'"):
            client.create_shard("us/orders", SCHEMA, ["id"])
        with pytest.raises(Forbidden, match="no scope 'admin'"):
            shard.drop(force=True)


def test_who_has_neither_is_refused(place: Place, server: Server) -> None:
    with pytest.raises(InvalidUsage, match="not trusted"):
        persist.connect(server.url)
    with pytest.raises(Unauthorized, match="requires a token"):
        persist.connect(server.url, ca_file=place.ca)
    with pytest.raises(Unauthorized, match="is unknown"):
        persist.connect(server.url, ca_file=place.ca, certificate_file=place.stranger)
    with pytest.raises((ssl.SSLError, OSError)):
        place.asked(server, place.foreign)
    with pytest.raises(PersistError):
        persist.connect(server.url, ca_file=place.ca, certificate_file=place.foreign, timeout_s=2.0)


def test_the_index_of_a_server_is_asked_for_by_our_certificate(
    place: Place, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that tells the index may ask for a certificate, and show one that only its CA vouches for."""
    with pytest.raises(Unavailable, match="does not answer"):
        open_index(server.url, None, SystemClock()).fetch()
    ours = ServerSettings(index=server.url, ca_file=place.ca, certificate_file=place.etl)
    with pytest.raises(Unavailable, match="has no valid index"):  # it answers, and has none
        ours.open_index(SystemClock()).fetch()  # type: ignore[union-attr]
    with pytest.raises(InvalidUsage, match="ca_file"):
        replace(ours, ca_file=str(tmp_path / "missing.pem")).open_index(SystemClock())
    index = tmp_path / "regions.json"
    write_index(index, RegionIndex({"eu": RegionEntry((server.url,), (server.url,))}))
    for variables, ends in (({}, 1), ({"PERSIST_CERTIFICATE_FILE": place.etl}, 0)):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main(["region", "check", "--index", str(index), "--ca-file", place.ca]) == ends
    monkeypatch.setenv("PERSIST_CA_FILE", place.ca)
    assert main(["region", "check", "--index", str(index)]) == 0
    capsys.readouterr()


def test_pages_of_other_origins_ask_nothing_by_a_certificate(place: Place, server: Server) -> None:
    """A browser shows it whoever asks."""
    assert place.asked(server, place.etl, {"origin": "https://evil.example"})[0] == 403
    assert place.asked(server, place.etl, {"origin": "null"})[0] == 403
    assert place.asked(server, place.etl, {"origin": server.url})[0] == 200
    by_token = {"origin": "https://app.example", "authorization": f"Bearer {place.token}"}
    assert place.asked(server, place.etl, by_token)[0] == 200


def test_commands_show_the_certificate_of_the_environment(
    place: Place, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["--url", server.url, "--ca-file", place.ca]
    assert main(["shards", "--prefix", "eu/", *there]) == 1
    monkeypatch.setenv("PERSIST_CERTIFICATE_FILE", place.etl)
    assert main(["shards", "--prefix", "eu/", *there]) == 0
    assert main(["inspect", "usage", "eu/*", *there]) == 2
    assert "the token 'etl' has no scope 'admin'" in capsys.readouterr().err
    monkeypatch.setenv("PERSIST_CERTIFICATE_FILE", str(place.directory / "missing.pem"))
    assert main(["shards", "--prefix", "eu/", *there]) == 1
    assert "missing.pem' cannot be used" in capsys.readouterr().err


def test_certificates_of_the_server_and_of_clients_change_while_it_runs(place: Place, server: Server) -> None:
    with persist.connect(server.url, ca_file=place.ca, certificate_file=place.etl) as open_before:
        _, serial = place.asked(server, place.etl)
        place.write_certificate()
        wait_until(lambda: place.asked(server, place.etl)[1] not in ("", serial), "the new certificate")
        shard = open_before.create_shard("eu/before", SCHEMA, ["id"])
        kept, place.entries = place.entries, place.entries[:1]
        place.write_tokens()
        wait_until(lambda: place.asked(server, place.etl)[0] == 401, "the entry is gone")
        with pytest.raises(Unauthorized):  # also on a connection that was open before
            shard.insert([{"id": "a"}])
        place.entries = kept
        place.write_tokens()
        wait_until(lambda: place.asked(server, place.etl)[0] == 200, "the entry is there again, for the tests to come")
