"""Does a commit cost more because many writers and readers are registered, and many tokens remembered?

    python -m bench.crowd [--writers 10000] [--readers 10000] [--tokens 1000000]

Two shards lie in one location, one with ten of each and one with as many as asked for; they are filled by the commands
that clients send. Then one row is inserted in each in turns: `insert` by a writer of its own, `token` with a fresh
free-form token, for which the files of outcomes have to be looked at.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator

import pyarrow as pa

from bench.bars import bar, median, timed
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.location import Location, open_location
from persist.core import commands as c
from persist.core.errors import PersistError
from persist.core.ids import ReaderId, Token, WriterId, mint, token_of_key, writer_of
from persist.core.spill import OUTCOMES
from tests.support.location import InlineBackground

FEW = 10
LEASE_MS = 24 * 3600 * 1000
GROUP = 1_000  # commands that are committed together while a shard is filled
SAMPLES = 300
BOUND = 1.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--writers", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        location = open_location(f"persist://{folder}/location", background=InlineBackground())
        with Client(EmbeddedTransport(location)) as client:
            schema = pa.schema([("id", pa.string())])
            lonely, crowded = (
                client.create_shard("lonely", schema, ["id"]),
                client.create_shard("crowded", schema, ["id"]),
            )
            fill(location, lonely, FEW, FEW, FEW)
            fill(location, crowded, args.writers, args.readers, args.tokens)
            measure(lonely, crowded)


def fill(location: Location, shard: Shard, writers: int, readers: int, tokens: int) -> None:
    """Register writers and readers, and have tokens remembered."""
    commands = _commands(location, writers, readers, tokens)
    machine = location.machine(shard.name)
    while group := [command for _, command in zip(range(GROUP), commands, strict=False)]:
        leads: list[object] = []
        answers: list[object] = []
        for command in group:
            machine.submit(command, leads.append, answers.append)
        while leads:
            leads.pop()()  # type: ignore[operator]
        refused = [answer for answer in answers if isinstance(answer, PersistError)]
        assert len(answers) == len(group)
        assert not refused, refused[0]
    state = machine.refresh()
    files = state.files_of(OUTCOMES)
    known = sum(file.count for file in files) + len(state.outcomes)
    print(f"{shard.name}: {len(state.writers)} writers, {len(state.leased_readers)} readers, {known} tokens", end=" ")
    print(f"in {len(files)} files and the State", flush=True)


def _commands(location: Location, writers: int, readers: int, tokens: int) -> Iterator[c.Command]:
    for _ in range(writers):
        yield c.UpdateAttributes(mint(WriterId, location.ids), mint(Token, location.ids), (), lease_ms=LEASE_MS)
    for _ in range(readers):
        yield c.RegisterReader(mint(ReaderId, location.ids), None, LEASE_MS)
    for number in range(tokens):
        token = token_of_key(f"load {number}")
        yield c.UpdateAttributes(writer_of(token), token, (), digest=b"d" * 16)


def measure(lonely: Shard, crowded: Shard) -> None:
    """Print the figures and the bars. The shards are measured in turns, so that both see the same machine."""
    shards = {"few": lonely, "many": crowded}
    row = [{"id": "x"}]
    costs: dict[tuple[str, str], list[float]] = {}
    for sample in range(SAMPLES):
        for name, shard in shards.items():
            token = token_of_key(f"fresh {sample}")
            costs.setdefault(("insert", name), []).append(timed(lambda s=shard: s.insert(row)))  # type: ignore[misc]
            given = timed(lambda s=shard, t=token: s.insert(row, token=t))  # type: ignore[misc]
            costs.setdefault(("token", name), []).append(given)
    for kind in ("insert", "token"):
        few, many = (median(costs[kind, name]) for name in shards)
        print(f"{kind}: few {few * 1e3:.3f} ms, many {many * 1e3:.3f} ms", flush=True)
        bar(f"crowd-{kind}", many / few, f"<= {BOUND}")


if __name__ == "__main__":
    main()
