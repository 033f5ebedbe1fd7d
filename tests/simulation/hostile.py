"""A client that lies about what it staged. Every one of its commands must be refused, and none may harm anybody.

Its tokens are not among the writes of the history. So where one of its commands lands, the oracle sees it too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from persist.core import commands as c
from persist.core.batch import Part, Run
from persist.core.blob_keys import part_key
from persist.core.errors import Corruption, Expired, InvalidUsage
from persist.core.ids import PartId, Token, WriterId, mint
from persist.core.record import replace
from tests.simulation.host import KEYS, MAIN, WEATHER, WRITE_LEASE_MS, Host, expect_damage, extras_of, me
from tests.simulation.oracle import Violation, Write
from tests.simulation.writers import as_table, attempted, told

ROWS = 80  # too many to be inline
MINE_MAX = 20  # parts that it has committed, to name them again later
LEAST = 3  # of its lies
LOOKS = 30  # whether a part that it committed has left the State


class Liar:
    """What one hostile client knows: parts that it committed honestly, and those of others in the State."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.mine: deque[Part] = deque(maxlen=MINE_MAX)

    def lies(self, staged: Part) -> Iterator[tuple[str, tuple[Run, ...]]]:
        """What it may say now, with a name."""
        plain = staged.without_receipt()
        here = {part.id: part for part in self._host.location.machine(MAIN).refresh().trace.parts()}
        for part in self.mine:
            yield "a part that left" if part.id not in here else "its part again", (Run((part,)),)
        others = [part for part in here.values() if part.key is not None and part.time is not None]
        if others:
            yield "a part of others", (Run((replace(others[-1], time=None, time_min=0, time_max=0),)),)
        yield "a part that is not there", (Run((self._absent(plain),)),)
        yield "a part twice", (Run((plain,)), Run((plain,)))
        for changes in ({"rows": plain.rows + 1}, {"key_lower": b"\xff"}, {"diff_sum": 7}, {"size": plain.size - 1}):
            yield f"other {next(iter(changes))}", (Run((replace(plain, **changes),)),)
        yield "a receipt for something else", (Run((replace(staged, rows=1),)),)

    def _absent(self, part: Part) -> Part:
        """No blob has this key."""
        host = self._host
        fresh, shard = mint(PartId, host.ids), host.location.machine(MAIN).state().shard_id
        return replace(part, id=fresh, key=part_key(shard, mint(WriterId, host.ids), fresh))


def hostile(host: Host) -> None:
    """Stages a part now and then, lies about it and about others, and then commits it."""
    shard, liar = host.open(MAIN), Liar(host)
    extras, told_lies = extras_of(shard), 0
    writer = shard.open_writer()
    while host.work() or (told_lies < LEAST and not host.run.over):
        host.sleep(0.5)
        write = Write(0, "insert", me(host), MAIN, [(host.random.choice(KEYS), n, 0, 1) for n in range(ROWS)])
        try:
            [run] = writer.stage(as_table(write.updates, timed=False, extras=extras), None)
            for what, runs in liar.lies(run.parts[0]):
                told_lies += _tell(host, runs, what)
        except (*WEATHER, InvalidUsage):
            continue
        except Corruption:
            expect_damage(host)
            continue
        with attempted(host, write):
            told(write, writer.commit_insert((run,)))
        if write.answer == "ok":
            liar.mine.append(run.parts[0])
            _once_it_left(host, run)
        elif write.answer == "unknown":
            writer = shard.open_writer()


def _once_it_left(host: Host, run: Run) -> None:
    """Commit the part again as soon as it has left the State, while its blob is still there."""
    for _ in range(LOOKS):
        host.sleep(0.3)
        try:
            state = host.location.machine(MAIN).refresh()
            if not state.trace.holds(run.parts[0].id):
                host.run.path("part left")
                _tell(host, (run,), "a part that left")
                return
        except WEATHER:
            continue
        except Corruption:
            expect_damage(host)


def _tell(host: Host, runs: tuple[Run, ...], what: str) -> bool:
    """Send it as an insert. Whether it was refused, for good."""
    writer, token = mint(WriterId, host.ids), mint(Token, host.ids)
    host.run.oracle.note(f"{me(host)} names {what}: {runs[0].parts[0].id}")
    try:
        host.transport.inner.apply(MAIN, c.Insert(writer, token, runs, lease_ms=WRITE_LEASE_MS))
    except (InvalidUsage, Expired):
        host.run.path("lie refused")
        return True
    raise Violation("trusted", f"{me(host)} named {what}, and it was committed")
