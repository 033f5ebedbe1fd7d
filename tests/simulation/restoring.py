"""Restores in the simulation: who makes a shard again what it was, beside writers, and the builds that fail him.

The oracle takes a restore for what leads back to its time at the moment it lands. So every later read of the shard is
held against exactly the contents of then.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from persist.client.shard import Shard
from persist.core import commands as c
from persist.core.erasure_progress import erased_at
from persist.core.errors import Indeterminate, NotReadable
from persist.core.ids import Token
from persist.core.transitions import writers
from tests.simulation.breaking import Broken, every, ignores_the_upper, outcomes_stay_unread
from tests.simulation.host import MAIN, Host, me
from tests.simulation.oracle import Write, expect
from tests.simulation.readers import read_once, reading
from tests.simulation.writers import attempted, retried, told

RESTORED_SHARE = 0.7  # of the runs that have no other role of history
ANSWERS_LOST = 0.4  # of the restores that are answered
UNSETTLED_MAX = 8  # restores of a run whose outcome nobody knows, and which anybody may ask for again


def restorer(host: Host) -> None:
    """Restores a time that is readable. What he does not learn, he or one of another process asks later."""
    shard = host.open(MAIN)
    while not host.run.stopping:  # it takes no operation from others
        if host.run.unsettled and host.random.random() < 0.6:
            _settle(host, shard)
        else:
            _restore(host, shard)
        host.sleep(0.2)


def _restore(host: Host, shard: Shard) -> None:
    state = host.run.truth(MAIN).state
    low, high = state.since.element, state.upper.element
    if low is None or not high:
        return
    as_of = host.random.randint(min(low, high - 1), high - 1)
    write = Write(0, "restore", me(host), MAIN, [], as_of=as_of)
    retries = host.random.choice((0, 0, 2))
    with attempted(host, write) as token:
        told(write, _ask(host, shard, write, token, retries))
    if write.answer == "ok" and host.random.random() < ANSWERS_LOST:
        write.answer, write.told = "unknown", None  # who asked dies before he could tell anybody
    if write.answer == "unknown" and token is not None and len(host.run.unsettled) < UNSETTLED_MAX:
        host.run.unsettled.append((write, token))


def _settle(host: Host, shard: Shard) -> None:
    """Ask again with the token of a restore that somebody began, who may be of another process, and dead."""
    write, token = host.run.unsettled.pop(host.random.randrange(len(host.run.unsettled)))
    task = host.run.world.scheduler.current
    assert task is not None
    task.local["write"], task.local["given"] = write, token
    host.run.path("restore asked again")
    retried(host, write, lambda again: _ask(host, shard, write, again, retries=0))


def _ask(host: Host, shard: Shard, write: Write, token: Token | None, retries: int) -> c.Appended:
    """Restore, and look at the contents that the answer tells of."""
    assert write.as_of is not None
    truth = host.run.truth(MAIN)
    try:
        found = shard.restore(write.as_of, token=token, retries=retries)
    except NotReadable as error:
        since, erased = truth.state.since, erased_at(truth.state)
        passed = not since.less_equal(write.as_of) or write.as_of < erased
        expect(passed, "readable", f"{write.as_of} was not restored with since {since}, erased {erased}")
        raise Indeterminate("it is forgotten, and an earlier try may be under way") from error
    latest = (found.upper.element or 0) - 1
    same = truth.contents(latest) == truth.contents(write.as_of)
    expect(same, "restored", f"#{write.number} restored {write.as_of}, and the contents at {latest} differ from it")
    host.run.path("restored" if found.changed else "nothing to restore")
    with reading(host, MAIN, latest):
        read_once(host, shard, latest, pause_s=0)
    return c.Appended(found.lower, found.upper)


# --- broken builds


def restore_ignores_the_upper() -> Broken:
    """A restore lands though another write came since it looked."""
    return ignores_the_upper(c.RESTORE)


def restore_lands_twice() -> Broken:
    """What became of a restore is not remembered: who asks again restores again."""
    real = writers.answered

    def answered(state: Any, command: Any, context: Any) -> Any:
        is_restore = isinstance(command, c.Rewrite) and command.operation == c.RESTORE
        return None if is_restore else real(state, command, context)

    return every(patch.object(writers, "answered", answered), outcomes_stay_unread())


BROKEN = (restore_ignores_the_upper, restore_lands_twice)
