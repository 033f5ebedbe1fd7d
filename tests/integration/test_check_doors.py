"""`persist check` through a server, beside writers, with stores that are away, and with the right to read alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import persist
from blob import BlobUnavailable
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.check.check_runner import run_check
from persist.cli.inspect import FOUND, HEALTHY
from persist.copies.verify import QUICK, check_shard
from persist.core.errors import Unavailable
from persist.inspect.readonly_location import ReadOnlyLocation
from rpc.app import create_app
from rpc.auth import mint
from rpc.cli.program import main
from rpc.settings import ServerSettings
from tests.integration.test_inspect_http import Served, served
from tests.support.ailments import CALM, NAME, made
from tests.support.clocks import World
from tests.support.crashing import CrashingBlob, Fuse
from tests.support.inspected import everything
from tests.support.location import memory_location

SCHEMA = pa.schema([("id", pa.int64())])
CALMLY = ["--free", "0"]
OF_SERVERS = {"store-failing", "races-lost", "token-expires", "clock-off"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as found:
        yield found


def ended(place: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["check", "--quick", *words, *CALMLY, "--json"])
    told = capsys.readouterr()
    assert told.err == ""
    document: dict[str, Any] = json.loads(told.out)
    return code, document


# --- through a server


def test_a_server_tells_what_the_stores_tell(
    here: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for ages, which are counted from now on, and for what the server alone knows."""
    monkeypatch.setenv("PERSIST_TOKEN", here.tokens["admin"])
    told = []
    for where in (["--dir", str(here.place)], ["--url", here.server.url]):
        code, document = ended(here.place, capsys, *where)
        assert code == FOUND
        named = [(one["id"], one["shard"], one["command"]) for one in document["findings"]]
        told.append((document["location"], document["shards"], [one for one in named if one[0] not in OF_SERVERS]))
    assert told[0] == told[1]


def test_limits_are_passed_on(
    here: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIST_TOKEN", here.tokens["admin"])
    at = ["--url", here.server.url]
    ids = [
        {one["id"] for one in ended(here.place, capsys, *at, *more)[1]["findings"]}
        for more in (["--held", "1m"], ["--held", "9999w"])
    ]
    assert "since-held" in ids[0]
    assert "since-held" not in ids[1]


def test_a_token_that_is_good_for_a_prefix_is_told_of_its_shards_alone(
    here: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIST_TOKEN", here.tokens["eu"])
    _, document = ended(here.place, capsys, "eu/*", "--url", here.server.url)
    assert document["shards"] == 1
    assert {one["shard"] for one in document["findings"]} <= {None, "eu/copies"}
    for words in ([], ["*"], ["o*"], ["orders"]):
        assert main(["check", "--quick", *words, "--url", here.server.url]) == 2
        assert "the token 'eu'" in capsys.readouterr().err


def test_what_lies_beside_is_looked_at_from_here(
    here: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIST_TOKEN", here.tokens["admin"])
    file, url = tmp_path / "tokens.json", f"file://{tmp_path}/backups"
    assert main(["token", "create", "etl", "--file", str(file), "--expires", "2099-01-31"]) == 0
    file.write_text(file.read_text().replace("2099", "2020"))  # years go by
    assert main(["backup", "create", "--to", url, "--dir", str(here.place)]) == 0
    at = ["--url", here.server.url, "--tokens", str(file), "--backup", url]
    _, document = ended(here.place, capsys, *at, "--backup-age", "1ms")
    found = {one["id"]: one for one in document["findings"]}
    assert {"token-expires", "backup-old"} <= found.keys()
    assert "'etl' expired" in found["token-expires"]["what"]
    ranks = [("critical", "warning", "note").index(one["severity"]) for one in document["findings"]]
    assert ranks == sorted(ranks)


def test_a_server_tells_of_tokens_of_its_file_and_counts_the_requests(tmp_path: Path) -> None:
    token, digest = mint("boss")
    ending = {"id": "etl", "sha256": digest, "scopes": ["read"], "expires": "1970-01-05"}  # by the clock of the test
    limited, other = mint("eu")
    entries = [
        {"id": "boss", "sha256": digest, "scopes": ["admin"]},
        ending,
        {"id": "eu", "sha256": other, "scopes": ["admin"], "prefixes": ["eu/"]},
    ]
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"tokens": entries}))
    location = memory_location()
    with TestClient(create_app(location, ServerSettings(tokens_file=str(file)))) as http:
        answer = http.get("/v1/check?free=0", headers={"authorization": f"Bearer {token}"})
        assert answer.status_code == 200
        told = [one["what"] for one in answer.json()["findings"]]
        assert told == ["the token 'etl' expires in 3 days, 1970-01-05T00:00:00Z"]
        few = http.get("/v1/check?pattern=eu/*", headers={"authorization": f"Bearer {limited}"}).json()
        assert few["findings"] == []
        assert 'verb="check"' in http.get("/metrics", headers={"authorization": f"Bearer {token}"}).text
    location.close()


def test_what_cannot_be_asked_is_refused() -> None:
    location = memory_location()
    with TestClient(create_app(location, ServerSettings(insecure=True))) as http:
        for query in ("held=x", "free=1000", "more=1", "backup_age=1d", "held=1d&held=2d", f"pattern={'x' * 200}%20"):
            answer = http.get(f"/v1/check?{query}")
            assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage"), query
        assert http.get("/v1/check?pattern=nowhere").json()["kind"] == "unknown_shard"
        assert http.post("/v1/check").status_code == 405
        assert http.get("/v1/check?free=0").json()["findings"] == []
    location.close()


def test_a_server_of_a_copy_refuses() -> None:
    location = memory_location()
    with TestClient(create_app(location, ServerSettings(insecure=True))) as http:
        location.is_copy = True
        answer = http.get("/v1/check")
        assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage")
        assert "ask a server at home" in answer.json()["detail"]
    location.close()


# --- stores


def test_backups_are_looked_at_without_writing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, backups = tmp_path / "location", tmp_path / "backups"
    with persist.connect(f"persist://{place}") as client:
        client.create_shard("orders", SCHEMA, ["id"]).insert([{"id": 1}])
    assert main(["backup", "create", "--to", f"file://{backups}", "--dir", str(place)]) == 0
    before = everything(tmp_path)
    code, document = ended(place, capsys, "--backup", f"file://{backups}", "--dir", str(place))
    assert (code, document["findings"]) == (HEALTHY, [])
    assert everything(tmp_path) == before


def test_a_location_that_was_never_bound_is_not_bound() -> None:
    blob, consensus = MemoryBlob(), MemoryConsensus()
    assert run_check(ReadOnlyLocation(blob, consensus), None, CALM).findings == []
    assert list(blob.list("")) == []
    assert consensus.keys("", "", 10, True) == []
    assert consensus.head("\x7fbinding") is None


class Away(Fuse):
    """A store that is away from its n-th call on."""

    def step(self, work: Callable[[], Any]) -> Any:
        self.steps += 1
        if self.at is not None and self.steps > self.at:
            raise BlobUnavailable("the store is away")
        return work()


def test_a_store_that_goes_away_is_told_and_no_half_a_report() -> None:
    world = World()
    made(world.machine())
    there = Away()
    assert run_check(ReadOnlyLocation(CrashingBlob(world.blob, there), world.consensus), None, CALM).shards == 1
    assert there.steps
    for most in range(there.steps):
        away = ReadOnlyLocation(CrashingBlob(world.blob, Away(most)), world.consensus)
        with pytest.raises(Unavailable, match="the store is away"):
            run_check(away, None, CALM)


# --- beside others


def test_a_shard_that_is_dropped_meanwhile_is_left_out() -> None:
    world = World()
    machine = world.machine()
    made(machine)
    look = ReadOnlyLocation(world.blob, world.consensus)
    assert check_shard(look, "nowhere", QUICK, look.blob) is None
    machine.shard(NAME).drop()
    assert run_check(look, None, CALM).shards == 0
    with pytest.raises(persist.UnknownShard):
        run_check(look, NAME, CALM)
