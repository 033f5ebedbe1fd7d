"""Maintenance looks at a sample once a day: it tells what it finds, mends nothing, and is in nobody's way."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from compactor.loop import Loop
from compactor.metering import MaintenanceMetrics
from compactor.monitor import of_maintenance
from compactor.scrubber import DAY_S, RETRY_S, Scrubber, samples_per_day
from persist import InvalidUsage, Unavailable
from persist.commit.location import Location
from persist.copies.verify import Sample, samples_of
from persist.formats.exposition import exposition
from rpc.cli.program import main
from rpc.config_file import load
from rpc.settings import ServerSettings
from tests.support.damaged import Damaged, healthy, opened
from tests.support.location import TestClock
from tests.support.monitored import maintenance, series
from tests.support.waiting import WAIT_S

FAST = 1 << 30


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compactor.scrubber.PAUSE_S", 0.0)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return healthy(tmp_path_factory.mktemp("healthy") / "location")


@pytest.fixture
def place(sound: Path, tmp_path: Path) -> Damaged:
    shutil.copytree(sound, tmp_path / "location")
    return Damaged(tmp_path / "location")


@pytest.fixture
def location(place: Damaged) -> Iterator[Location]:
    with closing(opened(place.root)) as found:
        yield found


def scrubber(
    location: Location, metrics: MaintenanceMetrics, *, of: int = 1, rate: int = FAST, after_s: float = 0.0
) -> Scrubber:
    names = partial(location.all_names, with_dropped=False)
    return Scrubber(location, metrics, names, of=of, rate=rate, first_after_s=after_s)


def clock_of(location: Location) -> TestClock:
    assert isinstance(location.clock, TestClock)
    return location.clock


def test_a_sound_location_has_no_findings_and_its_figures_tell_that_it_was_looked_at(location: Location) -> None:
    metrics = MaintenanceMetrics()
    loop = Loop(location, lambda name: None)

    def figures() -> dict[str, float]:
        return series(exposition(of_maintenance(location, loop, metrics)).decode())

    assert figures()["persist_verify_timestamp_seconds"] == 0
    assert scrubber(location, metrics).once()
    told = figures()
    assert (told["persist_verify_findings_total"], told["persist_verify_runs_total"]) == (0, 1)
    assert told["persist_verify_bytes_total"] > 30_000
    assert told["persist_verify_timestamp_seconds"] == location.clock.now_ms() / 1000


def test_findings_are_counted_and_logged(place: Damaged, location: Location, caplog: pytest.LogCaptureFixture) -> None:
    flipped = place.flip(place.keys("other", ".parquet")[0])
    missing = place.write(place.keys("bundled", ".parquet")[-1], None)
    before = {path: path.read_bytes() for path in place.root.rglob("*") if path.is_file() and "blob" in path.parts}
    metrics = MaintenanceMetrics()
    with caplog.at_level(logging.WARNING, "persist.verify"):
        scrubber(location, metrics).once()
    told: list[Any] = [record for record in caplog.records if record.name == "persist.verify"]
    assert [(record.shard, record.kind, record.key) for record in told] == [
        ("bundled", "missing", missing),
        ("other", "part", flipped),
    ]
    assert all(record.message == "verify found damage" and record.reason for record in told)
    assert metrics.counters.verify_findings == 2
    assert before == {path: path.read_bytes() for path in before}, "it mends nothing"


def test_a_sample_comes_once_a_day_and_each_day_is_another_one(place: Damaged, location: Location) -> None:
    """The damage of each part is found in one of four days, and on the fifth day as on the first."""
    keys = {place.flip(key) for key in place.keys("other", ".parquet")}
    metrics = MaintenanceMetrics()
    four = scrubber(location, metrics, of=4, after_s=600.0)
    assert not four.once()
    clock_of(location).advance_ms(600_000)
    found = []
    for _ in range(5):
        before = metrics.counters.verify_findings
        assert four.once()
        assert not four.once()
        found.append(metrics.counters.verify_findings - before)
        clock_of(location).advance_ms(int(DAY_S * 1000))
    assert sum(found[:4]) == len(keys)
    assert found[4] == found[0]


def test_it_keeps_to_its_rate_and_one_that_is_to_end_does_not_wait_for_it(location: Location) -> None:
    class Waits:
        def __init__(self) -> None:
            self.waits: list[float] = []

        def is_set(self) -> bool:
            return False

        def wait(self, seconds: float) -> bool:
            self.waits.append(seconds)
            clock_of(location).advance_ms(int(seconds * 1000))
            return False

    metrics, waits = MaintenanceMetrics(), Waits()
    slow = scrubber(location, metrics, rate=4_096)
    slow._stop = slow._blob._stop = slow._blob._throttle._stop = waits  # type: ignore[attr-defined, assignment]
    before_ms = location.clock.now_ms()
    slow.once()
    took_s = (location.clock.now_ms() - before_ms) / 1000
    assert took_s >= metrics.counters.verify_bytes / 4_096 - 2, "bytes that a rest of a second had saved up"
    ended = scrubber(location, MaintenanceMetrics(), rate=4_096)
    ended.stop()
    ended.once()
    assert not ended._metrics.counters.verify_runs


def test_shards_that_cannot_be_listed_are_looked_at_again_soon(location: Location) -> None:
    def names() -> Iterator[str]:
        raise Unavailable("no answer")
        yield ""

    tried = Scrubber(location, MaintenanceMetrics(), names, of=1, rate=FAST, first_after_s=0.0)
    assert tried.once()
    clock_of(location).advance_ms(int(RETRY_S * 1000))
    assert tried.once()


def test_one_shard_that_cannot_be_read_now_does_not_keep_the_others(
    location: Location, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = location.versions.load

    def load(name: str) -> Any:
        if name == "inline":
            raise Unavailable("no answer")
        return real(name)

    monkeypatch.setattr(location.versions, "load", load)
    metrics = MaintenanceMetrics()
    scrubber(location, metrics).once()
    assert [record.message for record in caplog.records] == ["a shard could not be verified"]
    assert metrics.counters.verify_runs == 1


def test_a_process_of_maintenance_takes_samples_until_it_ends(place: Damaged) -> None:
    """Its first one comes later than this test ends: what is looked at here is that it begins and ends with it."""
    with maintenance("maintain", "run", "--no-gc", "--dir", str(place.root), "--verify-sample", "50%") as process:
        assert process.series()["persist_verify_findings_total"] == 0
        process.process.terminate()
        assert process.process.wait(WAIT_S) == 0


def test_the_variable_says_it_for_servers_and_their_maintenance(
    place: Damaged, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ServerSettings().verify_sample == "1%"
    for text in ("0", "5%"):
        load({}, {"PERSIST_VERIFY_SAMPLE": text}).settings.check()
    with pytest.raises(InvalidUsage, match="'often' is not a sample"):
        load({}, {"PERSIST_VERIFY_SAMPLE": "often"}).settings.check()
    monkeypatch.setenv("PERSIST_VERIFY_SAMPLE", "often")
    assert main(["maintain", "run", "--no-gc", "--dir", str(place.root), "--once"]) == 1
    assert "'often' is not a sample" in capsys.readouterr().err


def test_samples_and_their_numbers() -> None:
    assert [samples_of(text) for text in ("100%", "1%", "0.01%", "3%")] == [1, 100, 10_000, 33]
    assert (samples_per_day("0"), samples_per_day("2%")) == (None, 50)
    for wrong in ("1", "200%", "0.001%"):
        with pytest.raises(InvalidUsage):
            samples_of(wrong)
    names = [f"p{number:032x}" for number in range(3_000)]
    taken = [[name for name in names if Sample(number, 30).takes(name)] for number in range(30)]
    assert sorted(name for some in taken for name in some) == names, "each in one of them"
    assert max(map(len, taken)) < 160, "of about equal size"
