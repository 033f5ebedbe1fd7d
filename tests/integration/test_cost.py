"""`persist cost`: what it prints of a frozen location, that it writes nothing, and what processes have counted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest

import persist
from persist.cli.__main__ import main
from persist.cli.cost_table import money
from persist.cost import published
from persist.cost.priced import gets_of
from persist.cost.prices import EXAMPLE, GB, built_in
from persist.inspect import looking
from persist.inspect.usage import Room
from tests.support.inspected import NOW_MS, ROLLUP, FixedClock, copied, everything
from tests.support.server import Server

GOLDEN = Path(__file__).parent / "costed"
SCHEMA = pa.schema([("id", pa.int64())])
VALIDATOR = jsonschema.Draft202012Validator(json.loads(published.FILE.read_text(encoding="utf-8")))
# What is asked, by the name of its golden file.
COMMANDS: dict[str, list[str]] = {
    "all": [],
    "some": ["t*"],
    "by-day": ["*o*", "--by-day"],
    "before": ["orders", "--days", "0.5"],
    "all-time": ["--days", "3660"],
}
Ran = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A frozen location whose files are a day old, as old as they were when it was frozen."""
    place = copied(tmp_path_factory.mktemp("cost") / "location")
    for path in (place / "blob").rglob("*"):
        os.utime(path, ns=((NOW_MS - 86_400_000) * 1_000_000,) * 2)
    return place


@pytest.fixture
def ran(directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Runs the command on the frozen location: its exit code, and what it printed."""
    monkeypatch.setattr(looking, "SystemClock", FixedClock)

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["cost", *arguments, "--dir", str(directory)])
        told = capsys.readouterr()
        assert told.err == ""
        return code, told.out

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_it_prints_of_a_frozen_location_what_it_did(name: str, ran: Ran, pytestconfig: pytest.Config) -> None:
    """`pytest --rewrite` renews the files: read the difference."""
    (code, text), (again, as_json) = ran(*COMMANDS[name]), ran(*COMMANDS[name], "--json")
    assert (code, again) == (0, 0)
    VALIDATOR.validate(json.loads(as_json))
    for kind, said in (("txt", text), ("json", as_json)):
        file = GOLDEN / f"{name}.{kind}"
        if pytestconfig.getoption("--rewrite"):
            file.write_text(said, encoding="utf-8")
        assert said == file.read_text(encoding="utf-8")


def test_each_golden_file_is_of_a_command() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(COMMANDS)


def test_the_published_schema_is_that_of_the_records() -> None:
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)
    assert published.FILE.read_text(encoding="utf-8") == published.text(), "python -m persist.cost.published"


def test_what_is_kept_is_what_inspect_usage_tells(
    ran: Ran, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(ran("--json")[1])
    assert main(["inspect", "usage", "--json", "--dir", str(directory)]) == 0
    usage = json.loads(capsys.readouterr().out)
    for told, row in zip(document["shards"], usage["rows"], strict=True):
        assert told["shard"] == row["shard"]
        assert {kind: told["held"][kind] for kind in ("total", "live", "history", "waiting")} == {
            kind: row[kind] for kind in ("total", "live", "history", "waiting")
        }
    beside = document["location"]["beside"]["kept"]
    assert document["location"]["held"]["total"]["blobs"] + beside["blobs"] == usage["about"]["listed"]["blobs"]
    assert document["location"]["log_bytes"] == usage["about"]["log_bytes"]


def test_days_add_up_to_what_a_shard_wrote_and_shards_to_the_location(ran: Ran) -> None:
    document = json.loads(ran("--json", "--days", "30")[1])

    def puts(written: dict[str, Any]) -> int:
        kinds = ("parts", "flushed", "compacted", "bundles", "rollups", "index")
        return sum(written[kind]["requests"] for kind in kinds)

    for shard in document["shards"]:
        assert sum(puts(day["written"]) for day in shard["days"]) == puts(shard["written"])
        assert sum(day["written"]["rows"] for day in shard["days"]) == shard["written"]["rows"]
    assert sum(puts(shard["written"]) for shard in document["shards"]) == puts(document["location"]["written"])


@pytest.mark.parametrize("frozen", ["v2", "v3", "v4"])
def test_it_writes_nothing_and_reads_the_locations_of_older_levels(
    frozen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = copied(tmp_path / "location", frozen)
    before = everything(place)
    assert main(["cost", "--dir", str(place), "--days", "3660", "--json"]) == 0
    VALIDATOR.validate(json.loads(capsys.readouterr().out))
    assert everything(place) == before


def test_what_is_damaged_is_told_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = copied(tmp_path / "location")
    (place / "blob" / ROLLUP).unlink()
    assert main(["cost", "--dir", str(place)]) == 1
    told = capsys.readouterr().out
    assert "DAMAGED orders: " in told
    assert "\norders " in told
    assert "tagged " in told


# --- prices


def test_prices_of_ones_own_take_the_place_of_all(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(
        EXAMPLE.replace("S3 Standard, us-east-1", "our cupboard").replace('"USD"', '"EUR"').replace("0.005 ", "5 ")
    )
    dearer, plain = json.loads(ran("--json", "--prices", str(file))[1]), json.loads(ran("--json")[1])
    assert dearer["prices"]["source"] == "ours.toml"
    assert dearer["location"]["written"]["cost"] == pytest.approx(1_000 * plain["location"]["written"]["cost"])
    assert dearer["location"]["month_cost"] == plain["location"]["month_cost"]
    told = ran("--prices", str(file))[1]
    assert told.startswith("prices: our cupboard (ours.toml)\n")
    assert "100.00 EUR a year buy" in told
    assert "$" not in told


def test_the_example_is_the_built_in_table(ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "--prices-example"]) == 0
    file = tmp_path / "example.toml"
    file.write_text(capsys.readouterr().out)
    again, plain = json.loads(ran("--json", "--prices", str(file))[1]), json.loads(ran("--json")[1])
    assert again["prices"].pop("source") == "example.toml"
    assert plain["prices"].pop("source") == "built in"
    assert again == plain


def test_a_log_store_that_costs_something_is_in_the_sums(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    head, _, tail = EXAMPLE.partition("[log_store]")
    file.write_text(f"{head}[log_store]{tail.replace('0.0 ', '12.0 ', 1)}")
    found, plain = (json.loads(ran("--json", *more)[1])["location"] for more in (["--prices", str(file)], []))
    assert found["month_cost"] == pytest.approx(plain["month_cost"] + 12)
    assert found["kept_day_cost"] == pytest.approx(plain["kept_day_cost"] + 12 * 12 / 365)
    assert "log store" in ran("--prices", str(file))[1]


def test_the_last_line_of_what_is_kept_is_the_sum_with_what_a_put_has_left(directory: Path, ran: Ran) -> None:
    aside = directory / "blob" / "~tmp" / "s-left"
    aside.parent.mkdir(exist_ok=True)
    aside.write_bytes(b"x" * 3_000)
    try:
        _, text = ran()
    finally:
        aside.unlink()
    lines = text.partition("kept ")[2].partition("\n\n")[0].splitlines()[1:]
    sizes = {line[:11].strip(): int(line[11:].split()[1]) for line in lines}
    assert sizes["of no shard"] > 3_000
    assert sizes.pop("all") == sum(sizes.values())


def test_prices_of_nothing_buy_all_that_is_wanted(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "free.toml"
    lines = [
        line if "=" not in line or '"' in line else f"{line.partition('=')[0]}= 0" for line in EXAMPLE.splitlines()
    ]
    file.write_text("\n".join(lines))
    assert "a year buy all that is wanted" in ran("--prices", str(file))[1]


# --- what processes have counted


def test_a_server_tells_the_requests_that_it_has_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tmp_path / "location", environment={"PERSIST_PUBLISH_EVERY": "0"}) as server:
        with persist.connect(server.url) as client:
            client.create_shard("orders", SCHEMA, ["id"]).insert([{"id": number} for number in range(50_000)])
        assert main(["cost", "--url", server.url, "--json"]) == 0
        alone = json.loads(capsys.readouterr().out)
        VALIDATOR.validate(alone)
        assert alone["location"] is alone["window"] is None
        asked = {one["kind"]: one for one in alone["metered"]["requests"]}
        assert asked["put"]["requests"] >= 1
        assert asked["put"]["cost"] == pytest.approx(asked["put"]["requests"] * 0.005 / 1_000)
        assert main(["cost", "--url", server.url, "--dir", str(tmp_path / "location"), "--json"]) == 0
        both = json.loads(capsys.readouterr().out)
        VALIDATOR.validate(both)
        assert both["location"]["shards"] == 1
        assert both["metered"]["commits"] >= 2
        assert main(["cost", "--url", server.url, "--dir", str(tmp_path / "location")]) == 0
        assert f"counted by {server.url} since they began" in capsys.readouterr().out


def test_watching_tells_what_a_day_at_this_rate_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tmp_path / "location", environment={"PERSIST_PUBLISH_EVERY": "0"}) as server:
        assert main(["cost", "--url", server.url, "--watch", "0.05", "--json"]) == 0
        metered = json.loads(capsys.readouterr().out)["metered"]
    assert metered["seconds"] >= 0.05
    assert metered["day_cost"] == pytest.approx(metered["cost"] / metered["seconds"] * 86_400, abs=1e-6)


def test_two_scrapes_tell_what_came_in_between(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    with persist.connect(f"persist://{tmp_path / 'location'}") as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        files[0].write_text(json.dumps(client.metrics()))
        shard.insert(pa.table({"id": range(50_000)}))
        files[1].write_text(json.dumps(client.metrics()))
    assert main(["cost", "--scrape", str(files[0]), "--scrape", str(files[1]), "--json"]) == 0
    metered = json.loads(capsys.readouterr().out)["metered"]
    put = next(one for one in metered["requests"] if one["kind"] == "put")
    counted = [json.loads(file.read_text()) for file in files]
    series = 'persist_store_calls_total{outcome="ok",store="blob",verb="put"}'
    assert put["requests"] == counted[1][series] - counted[0][series] >= 1
    assert metered["gb"]["written"] >= put["cost"] / put["bytes"] * GB - 1e-6


def test_what_a_process_counts_is_told_by_the_kinds_that_a_store_bills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = {"put": 3, "get": 5, "get_range": 7, "stat": 11, "list": 13, "delete": 17, "unfinished": 100}
    lines = [f'persist_store_calls_total{{outcome="ok",store="blob",verb="{v}"}} {n}' for v, n in calls.items()]
    lines += [
        'persist_store_calls_total{outcome="BlobUnavailable",store="blob",verb="put"} 1',
        'persist_store_calls_total{outcome="ok",store="consensus",verb="compare_and_set"} 19',
        'persist_store_calls_total{outcome="lost",store="consensus",verb="compare_and_set"} 4',
        'persist_store_bytes_total{outcome="ok",store="blob",verb="get_range"} 2048',
        'persist_store_bytes_total{outcome="ok",store="consensus",verb="compare_and_set"} 9999',
        "persist_commits_total 19",
    ]
    file = tmp_path / "metrics.txt"
    file.write_text("\n".join(["# HELP x y", *lines, ""]))
    assert main(["cost", "--scrape", str(file), "--json"]) == 0
    metered = json.loads(capsys.readouterr().out)["metered"]
    found = {one["kind"]: (one["requests"], one["bytes"]) for one in metered["requests"]}
    assert found == {"put": (4, 0), "get": (23, 2048), "list": (13, 0), "delete": (17, 0)}
    assert metered["commits"] == 19
    assert metered["cost"] == pytest.approx((17 * 0.005 + 23 * 0.0004) / 1_000)


def test_money_is_told_with_figures_and_never_as_a_power_of_ten() -> None:
    sums = {0.0: "$0.00", 1234.5: "$1,234.50", 0.0123: "$0.0123", 0.0000001234: "$0.000000123", -0.5: "$-0.500"}
    assert {value: money(value, built_in()) for value in sums} == sums


@pytest.mark.parametrize(
    ("blobs", "size", "gets"),
    [(0, 0, 0), (3, 3 * 2**20, 3), (3, 3 * 2**20 + 1, 6), (2, 32 * 2**20, 6), (1, 100 * 2**20, 13)],
)
def test_what_a_read_takes_goes_by_the_mean_size_of_a_blob(blobs: int, size: int, gets: int) -> None:
    assert gets_of(Room(blobs, size)) == gets
