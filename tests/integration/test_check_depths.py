"""`persist check` at its depths: whether everything that shards need is there and sound. It changes no store."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist.check.check_runner import run_check
from persist.check.findings import IDS, CheckThresholds
from persist.check.integrity_checks import ADVICE, OF_KIND
from persist.commit.location import LocationSettings
from persist.commit.state_loader import SCAN_LIMIT
from persist.copies.shard_facts import PAGE, FaultKind
from persist.copies.verify import QUICK, Depth, verify_shards
from persist.core.errors import InvalidUsage
from persist.core.state import Policy
from persist.inspect.readonly_location import ReadOnlyLocation
from rpc.cli.program import main
from tests.support.clocks import Machine, World

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
NAMES = ["eu/items", "eu/orders", "us/orders"]
KEPT = LocationSettings(policy=Policy(inline_part_bytes_max=0))


def opened(root: Path, settings: LocationSettings = KEPT) -> persist.Client:
    return persist.connect(f"persist://{root}", location=settings)


def filled(root: Path, settings: LocationSettings = KEPT) -> Path:
    with opened(root, settings) as client:
        for name in NAMES:
            shard = client.create_shard(name, SCHEMA, ["id"])
            for number in range(3):
                shard.insert([{"id": 10 * number + n, "v": "x"} for n in range(5)])
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return filled(tmp_path / "data")


def check(
    root: Path, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """The exit code, the findings, and the report."""
    capsys.readouterr()
    code = main(["check", "--free", "0", "--json", "--dir", str(root), *arguments])
    document = json.loads(capsys.readouterr().out)
    return code, document["findings"], document


def contents(root: Path) -> dict[str, str]:
    """A digest of every file, but for what SQLite keeps beside its own."""
    files = [path for path in root.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_sound_location_is_left_as_it_is(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(root)
    for depth in ([], ["--quick"], ["--deep"]):
        code, found, report = check(root, capsys, *depth)
        assert (code, found, report["shards"]) == (0, [], 3)
    assert check(root, capsys, "eu/*", "--deep")[2]["shards"] == 2
    assert check(root, capsys, "us/orders")[2]["shards"] == 1
    assert contents(root) == before


def test_what_nothing_names_is_no_fault(machine_with_orders: Machine) -> None:
    location = machine_with_orders.location
    key = next(key for key in location.machine("orders").refresh().blob_keys() if key.endswith(".parquet"))
    location.blob.put(key.replace("/p0", "/p1"), b"left by a process that was killed")
    [found] = verify_shards(location, ["orders"], Depth(deep=True))
    assert found.is_sound


@pytest.fixture
def machine_with_orders() -> Machine:
    machine = World(policy=Policy(inline_part_bytes_max=0)).machine()
    machine.client.create_shard("orders", SCHEMA, ["id"]).insert([{"id": 1, "v": "x"}])
    return machine


def test_a_dropped_shard_is_left_out(machine_with_orders: Machine) -> None:
    machine_with_orders.client.create_shard("gone", SCHEMA, ["id"]).drop()
    assert list(verify_shards(machine_with_orders.location, iter(["gone", "nobody"]), Depth())) == []


@pytest.mark.parametrize("how", [QUICK, Depth(), Depth(deep=True)], ids=["quick", "full", "deep"])
def test_a_log_is_read_once(how: Depth, machine_with_orders: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    world, scans = machine_with_orders.world, []
    real = world.consensus.scan

    def scan(key: str, from_seqno: int, limit: int) -> Any:
        scans.append((key, from_seqno, limit))
        return real(key, from_seqno, limit)

    monkeypatch.setattr(world.consensus, "scan", scan)
    assert (
        run_check(
            ReadOnlyLocation(world.blob, world.consensus), None, CheckThresholds(free_percent=0), depth=how
        ).findings
        == []
    )
    pages = [limit for key, first, limit in scans if (key, first) == ("orders", 1) and limit > 1]
    assert pages == [SCAN_LIMIT, PAGE], "the State is loaded, and the log walked"


def test_every_kind_of_fault_is_a_finding() -> None:
    assert set(OF_KIND) == set(FaultKind)
    assert set(OF_KIND.values()) == set(ADVICE) <= set(IDS)


def test_a_rate_without_deep_is_refused_in_python_too(machine_with_orders: Machine) -> None:
    with pytest.raises(InvalidUsage, match="rate requires deep"):
        list(verify_shards(machine_with_orders.location, iter(["orders"]), Depth(False, 2_000)))
