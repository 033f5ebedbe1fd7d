"""Bytes against a running server: no answer is a fault of the server, it stays up, small, and readable.

A run is named by its seed. It goes on where the last one ended, as the state in its directory says. What gives an
answer that was not seen before becomes a sample of its own, so that later bytes begin there.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.mutating import mutated
from tests.fuzz.targets import SCHEMA, TARGETS, Answer, Caller, Target

CORPUS = Path(__file__).parent / "corpus"
MEMORY_BYTES_MAX = 512 * 1024 * 1024  # of a server, as docs/operations.md promises
ROUND = 200  # inputs to one shard, after which it is read and dropped
LEARNED_MAX = 300  # samples that a run keeps, besides those of the repository
LEARNED_BYTES_MAX = 32 * 1024
EXPECTED = frozenset({501, 503, 504})  # of an input that asks for what cannot be had now
FORMS = ("ndjson", "csv", "arrow", "parquet")
_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|[0-9a-f]{8,}|\d+|\\u[0-9a-f]{4}")


class Failed(AssertionError):
    """What a server must not do, and the bytes that made it do so."""

    def __init__(self, target: str, number: int, data: bytes, what: str) -> None:
        super().__init__(f"{target}, input {number} of {len(data)} bytes: {what}")
        self.target = target
        self.data = data


@dataclass
class Run:
    """The inputs of one target. `directory` keeps where it is and what it learned; None keeps nothing."""

    name: str
    port: int
    pid: int
    seed: str = "1"
    directory: Path | None = None
    number: int = 0
    learned: list[bytes] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._target: Target = TARGETS[self.name]
        self._samples = list(samples_of(self.name))
        if self.directory is None:
            return
        self._home.mkdir(parents=True, exist_ok=True)
        if self._state.exists():
            kept = json.loads(self._state.read_text())
            self.number, self._seen = kept["number"], set(kept["seen"])
        self.learned = [path.read_bytes() for path in sorted(self._home.glob("learned-*.bin"))]

    @property
    def _home(self) -> Path:
        assert self.directory is not None
        return self.directory / self.name

    @property
    def _state(self) -> Path:
        return self._home / f"state-{self.seed}.json"

    def until(self, end_s: float, inputs_max: int | None = None) -> int:
        """Send inputs until then, in whole rounds; how many it were. Raises Failed."""
        caller, before = Caller(self.port), self.number
        try:
            while time.monotonic() < end_s and (inputs_max is None or self.number - before < inputs_max):
                self._round(caller, end_s)
                if self.directory is not None:
                    self._state.write_text(json.dumps({"number": self.number, "seen": sorted(self._seen)}))
        except Failed as failed:
            if self.directory is not None:
                (self._home / f"failed-{self.seed}-{self.number}.bin").write_bytes(failed.data)
            raise
        finally:
            caller.close()
        return self.number - before

    def _round(self, caller: Caller, end_s: float) -> None:
        shard, data = f"fuzz-{self.name}-{self.number}", b""
        self._expect(made(caller, shard), data, (200,), "no shard could be made")
        for _ in range(ROUND):
            data = mutated(f"{self.name}:{self.seed}", self.number, [*self._samples, *self.learned])
            answer = self._target.send(caller, shard, data, self.number)
            self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
            if answer.status >= 500 and answer.status not in EXPECTED:
                raise Failed(self.name, self.number, data, f"{answer.status} {answer.text[:2000]}")
            self._learn(data, answer)
            self.number += 1
            if time.monotonic() >= end_s:
                break
        self._expect(caller.ask("GET", "/healthz"), data, (200,), "the server does not answer")
        for form in FORMS:
            path = f"/v1/shards/{shard}/snapshot?format={form}&wait=0"
            self._expect(caller.ask("GET", path), data, (200, 404, 410, 503), f"the rows cannot be read as {form}")
        taken = peak_bytes(self.pid)
        if taken > MEMORY_BYTES_MAX:
            raise Failed(self.name, self.number, data, f"the server took {taken} bytes of memory")
        caller.ask("DELETE", f"/v1/shards/{shard}?force=true")

    def _expect(self, answer: Answer, data: bytes, statuses: tuple[int, ...], what: str) -> None:
        if answer.status not in statuses:
            raise Failed(self.name, self.number, data, f"{what}: {answer.status} {answer.text[:2000]}")

    def _learn(self, data: bytes, answer: Answer) -> None:
        """Keep what is answered as nothing was before, but for values."""
        told = f"{answer.status} {_VARIES.sub('_', _detail(answer.text))[:200]}"
        if told in self._seen or len(self.learned) >= LEARNED_MAX or len(data) > LEARNED_BYTES_MAX:
            return
        self._seen.add(told)
        self.learned.append(data)
        if self.directory is not None:
            (self._home / f"learned-{len(self.learned):04}.bin").write_bytes(data)


def samples_of(name: str) -> Iterator[bytes]:
    """The samples of a target that the repository keeps, in order."""
    for path in sorted((CORPUS / name).glob("*.bin")):
        yield path.read_bytes()


def made(caller: Caller, shard: str) -> Answer:
    schema = base64.b64encode(SCHEMA.arrow.serialize().to_pybytes()).decode()
    return caller.ask("PUT", f"/v1/shards/{shard}", json.dumps({"schema": schema, "key": ["id"]}).encode())


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    return memory_bytes(pid, "VmHWM")


def memory_bytes(pid: int, what: str) -> int:
    """What Linux tells of the memory of a process: VmRSS is what it has, VmHWM what it had at most. Elsewhere 0."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:")), 0)


def _detail(text: str) -> str:
    try:
        found = json.loads(text)
    except ValueError:
        return text[:50]
    return str(found.get("detail", text[:50])) if isinstance(found, dict) else text[:50]
