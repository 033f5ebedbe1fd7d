"""Rivals of one table: who acts while another one is in the middle of a call, and whose answers are lost."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.transport import ForwardingTransport, Transport
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import Indeterminate, PersistError, UpperMismatch
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import Policy
from tests.support.location import memory_location
from tests.support.table_model import COLUMNS, KEY, VERBS, Bag, Story, Verb, contents, options

NAME = "table"
STEPS = 10
DEPTH_MAX = 3  # rivals that come between the calls of rivals
WRITES = (c.Rewrite, c.Insert, c.CompareAndAppend, c.UpdateAttributes)
COMMONLY, SELDOM = 0.4, 0.02  # how often somebody comes between: before a commit, and before any other call
LOST = 0.1  # answers to commits
LATE = 0.04  # commits that come when nobody waits for them any more, as from a server that was stopped


class Rivals:
    """A table in memory, and who writes to it. What happens follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.story = Story()
        policy = Policy(inline_part_bytes_max=self.rng.choice([0, 4096]), rollup_every=8, inline_batches=16)
        self.location = memory_location(policy=policy)
        self.depth = 0
        self.refused = 0
        self.failures: list[Exception] = []
        self.late: list[Callable[[], object]] = []
        self.told: dict[str, list[c.Result]] = {}  # what the calls of a name were answered, whoever hears it
        self.unknown: list[tuple[str, Verb]] = []  # calls without a token that ended so
        self.plain = Client(self.transport()).create_shard(NAME, COLUMNS, KEY)
        self.rivals: list[PythonWriter] = []
        self.rivals = [PythonWriter(self) for _ in range(4)]

    def transport(self) -> EmbeddedTransport:
        return EmbeddedTransport(self.location)

    def act(self) -> None:
        """One rival who is free makes one call."""
        rival = self.rng.choice([one for one in self.rivals if not one.busy])
        rival.busy = True
        try:
            rival.act()
        except Exception as error:  # whoever is in the middle of a call may take it for an error of that
            self.failures.append(error)
            raise AssertionError(repr(error)) from error
        rival.busy = False

    def between(self, chance: float = COMMONLY) -> None:
        """Somebody else may act now; a request that was held up may arrive."""
        if self.late and self.rng.random() < chance:
            self.deliver(self.rng.randrange(len(self.late)))
        if self.rivals and self.depth < DEPTH_MAX and self.rng.random() < chance:
            self.depth += 1
            self.act()
            self.depth -= 1

    def deliver(self, which: int) -> None:
        """A request arrives of which nobody hears what it came to."""
        with suppress(PersistError):
            self.late.pop(which)()

    def heard(self, caller: Caller, done: c.Result) -> None:
        """A write was answered, whoever hears the answer."""
        name = json.loads(caller.info or b"{}").get("call")
        if name is not None:
            self.told.setdefault(name, []).append(done)

    def landed(self, name: str) -> c.Appended | None:
        """Where a call landed; None: it did not. No call lands twice."""
        found = {(one.lower, one.upper): one for one in self.told.get(name, ()) if isinstance(one, c.Appended)}
        assert len(found) <= 1, f"{name} landed {len(found)} times"
        return next(iter(found.values()), None)

    def refuse(self, read_time: int) -> None:
        """Somebody was told that others wrote after this time."""
        assert self.upper != read_time + 1, "nobody has"
        self.refused += 1

    @property
    def upper(self) -> int:
        upper = self.plain.upper().element
        assert upper is not None
        return upper

    def check(self) -> None:
        """Every time equals the serial model, and what listeners hear adds up to the contents."""
        assert not self.failures
        while self.late:
            self.deliver(0)
        for name, verb in self.unknown:
            if (done := self.landed(name)) is not None:
                self.story.tell(verb, done)
        self.story.check(lambda time: contents(self.plain, time), self.upper)
        heard: Bag = Counter()
        for event in self.plain.listen(None, until=self.upper):
            for row in event.updates.to_pylist():
                heard[row["k"], row["a"], row["b"]] += row["__diff"]
        assert {row: n for row, n in heard.items() if n} == contents(self.plain, self.upper - 1)


class PythonWriter:
    """A program that calls the verbs."""

    def __init__(self, rivals: Rivals) -> None:
        self.busy = False
        self._calls = 0
        self._rivals = rivals
        self._client = Client(Interrupted(rivals.transport(), rivals))
        self._shard = self._client.shard(NAME)

    def act(self) -> None:
        rivals = self._rivals
        verb = rivals.rng.choice(VERBS)(rivals.rng)
        chosen = options(rivals.rng, self._shard, verb, self._client.new_token)
        read_time, token = chosen.get("read_time"), chosen.get("token")
        self._calls += 1
        name = f"{id(self)} {self._calls}"
        try:
            done = verb.run(self._shard, {**chosen, "info": {"call": name}})
        except UpperMismatch:
            assert read_time is not None
            return rivals.refuse(read_time)
        except Indeterminate:
            assert token is None
            return rivals.unknown.append((name, verb))
        assert read_time is None or done.lower.element == read_time + 1
        if token is not None:  # whoever repeats it is answered the same
            with suppress(Indeterminate):
                again = verb.run(self._shard, chosen)
                assert (again.lower, again.upper) == (done.lower, done.upper)
        return rivals.story.tell(verb, done)


class Interrupted(ForwardingTransport):
    """Before each call somebody else may act. The answers to commits are lost now and then, and some come late."""

    def __init__(self, inner: Transport, rivals: Rivals) -> None:
        super().__init__(inner)
        self._rivals = rivals

    def view(self, name: str, request: ViewRequest) -> ShardView:
        self._rivals.between(SELDOM)
        return super().view(name, request)

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        if not isinstance(command, WRITES):
            self._rivals.between(SELDOM)
            return super().apply(name, command, caller)
        rivals, rng = self._rivals, self._rivals.rng
        rivals.between()
        arrive, fate = partial(self._arrived, name, command, caller), rng.random()
        if fate < LATE:
            rivals.late.append(arrive)
            raise Indeterminate("the server went away during the request")
        done = arrive()
        if fate < LATE + LOST:
            raise Indeterminate("the answer was lost")
        return done

    def _arrived(self, name: str, command: c.Command, caller: Caller) -> c.Result:
        done = super().apply(name, command, caller)
        self._rivals.heard(caller, done)
        return done
