"""A short run of the fuzzer against one server, and the fuzzer itself. `make fuzz SECONDS=300` runs it for longer."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from tests.fuzz.__main__ import together
from tests.fuzz.fuzzing import ROUND, Failed, Run, samples_of
from tests.fuzz.mutating import mutated
from tests.fuzz.targets import TARGETS, Answer, Target
from tests.support.examples import is_whole
from tests.support.server import Server

SECONDS = 20


@pytest.mark.smoke
@pytest.mark.proof
def test_no_bytes_make_the_server_fail(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server:
        runs = [Run(name, server.port, server.process.pid) for name in TARGETS]
        assert (together(runs, SECONDS) if is_whole() else together(runs, inf, ROUND)) == []
        assert all(sum(run.statuses.values()) for run in runs)
        for run in runs:
            assert {200, 400} <= run.statuses.keys(), f"{run.name} shows too little: {run.statuses}"
        assert server.stop() == 0
    assert "Traceback" not in server.said()


def test_the_corpus_holds_the_samples_of_every_target() -> None:
    for name, target in TARGETS.items():
        assert set(target.samples().values()) <= set(samples_of(name)), f"python -m tests.fuzz --samples: {name}"


def test_an_input_follows_from_its_seed_and_number() -> None:
    samples = list(samples_of("csv"))
    assert [mutated("csv:1", number, samples) for number in range(50)] == [
        mutated("csv:1", number, samples) for number in range(50)
    ]
    assert mutated("csv:1", 3, samples) != mutated("csv:2", 3, samples)


def test_a_run_goes_on_where_it_ended_and_keeps_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a server of which input 7 finds the fault."""
    sent: list[int] = []

    def send(_caller: object, _shard: str, _data: bytes, number: int) -> Answer:
        sent.append(number)
        return Answer(500 if number == 7 else 400, '{"detail": "no"}')

    monkeypatch.setitem(TARGETS, "csv", Target(TARGETS["csv"].samples, send))
    monkeypatch.setattr("tests.fuzz.fuzzing.Caller.ask", lambda *_: Answer(200, ""))
    monkeypatch.setattr("tests.fuzz.fuzzing.ROUND", 4)

    def run() -> Run:
        return Run("csv", 0, 0, directory=tmp_path)

    assert run().until(float("inf"), 4) == 4
    with pytest.raises(Failed, match=r"csv, input 7 of .*: 500"):
        run().until(float("inf"), 8)
    assert sent == list(range(8))
    assert len(list((tmp_path / "csv").glob("failed-1-7.bin"))) == 1
    assert len(list((tmp_path / "csv").glob("learned-*.bin"))) == 1
