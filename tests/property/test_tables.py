"""Verbs that read before they write, by rivals who come between reads and commits: as if one ran after the other."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.transport import ForwardingTransport
from persist.core import commands as c
from persist.core.errors import Indeterminate, UpperMismatch
from persist.core.recorded import NOBODY, Caller
from persist.core.state import Policy
from tests.support.location import memory_location
from tests.support.table_model import COLUMNS, KEY, VERBS, Story, contents, options

NAME = "table"
STEPS = 10
DEPTH_MAX = 3  # rivals that come between the calls of rivals
SEEDS = range(20)
PROOF_SEEDS = range(20, 120)
WRITES = (c.Edit, c.Insert)


class Rivals:
    """Clients of one table. Before a commit of one another may act, and the answer to a commit may be lost."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.story = Story()
        policy = Policy(inline_part_bytes_max=self.rng.choice([0, 4096]), rollup_every=8)
        self.location = memory_location(policy=policy)
        self.depth = 0
        self.refused = 0
        client = Client(EmbeddedTransport(self.location))
        self.plain = client.create_shard(NAME, COLUMNS, KEY)
        self.shards = [Client(_Interrupted(EmbeddedTransport(self.location), self)).shard(NAME) for _ in range(4)]

    def act(self) -> None:
        """One rival makes one call."""
        verb, shard = self.rng.choice(VERBS)(self.rng), self.rng.choice(self.shards)
        chosen = options(self.rng, shard, verb, Client(EmbeddedTransport(self.location)).new_token)
        try:
            done = verb.run(shard, chosen)
        except UpperMismatch:
            assert "read_time" in chosen
            assert self.plain.upper().element != chosen["read_time"] + 1
            self.refused += 1
            return
        if (token := chosen.get("token")) is not None:  # whoever repeats it is answered the same
            again = verb.run(shard, {**chosen, "token": token})
            assert (again.lower, again.upper) == (done.lower, done.upper)
        self.story.tell(verb, done)

    def between(self) -> None:
        if self.depth < DEPTH_MAX and self.rng.random() < 0.4:
            self.depth += 1
            self.act()
            self.depth -= 1


class _Interrupted(ForwardingTransport):
    def __init__(self, inner: EmbeddedTransport, rivals: Rivals) -> None:
        super().__init__(inner)
        self._rivals = rivals

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        if not isinstance(command, WRITES):
            return super().apply(name, command, caller)
        self._rivals.between()
        done = super().apply(name, command, caller)
        if self._rivals.rng.random() < 0.1:
            raise Indeterminate("the answer was lost")
        return done


def check(seed: int) -> Rivals:
    rivals = Rivals(seed)
    for _ in range(STEPS):
        rivals.act()
    upper = rivals.plain.upper().element
    assert upper is not None
    rivals.story.check(lambda time: contents(rivals.plain, time), upper)
    heard: Counter[tuple[int, int | None, str | None]] = Counter()
    for event in rivals.plain.listen(None, until=upper):
        for row in event.updates.to_pylist():
            heard[row["k"], row["a"], row["b"]] += row["__diff"]
    assert {row: n for row, n in heard.items() if n} == contents(rivals.plain, upper - 1)
    return rivals


@pytest.mark.parametrize("seed", SEEDS)
def test_every_verb_is_as_if_it_had_run_alone_at_its_time(seed: int) -> None:
    check(seed)


@pytest.mark.proof
def test_every_verb_is_as_if_it_had_run_alone_in_many_stories() -> None:
    retries = refused = 0
    for seed in PROOF_SEEDS:
        found = check(seed)
        retries, refused = retries + found.story.retries, refused + found.refused
    assert retries
    assert refused


def broken_by(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first seed at which the broken build is caught, if there is one."""
    for seed in range(200):
        try:
            check(seed)
        except AssertionError:
            return [seed]
    return []


def test_a_build_that_does_not_look_at_what_others_changed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist.client.planned.Bound.concerns", lambda *_: False)
    assert broken_by(monkeypatch)
