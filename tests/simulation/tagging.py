"""Tags in the simulation: who sets, reads and takes them away, and the broken builds that lose what they keep."""

from __future__ import annotations

from unittest.mock import patch

import compactor.worker
import persist.commit.blob_tasks
from persist.client.shard import Shard
from persist.core.erasure_progress import erased_from
from persist.core.errors import Conflict, NotReadable
from tests.simulation.breaking import Broken, every
from tests.simulation.host import COPIES, MAIN, Host, weathered
from tests.simulation.oracle import expect
from tests.simulation.readers import read_once, reading

TAGGED_SHARE = 0.3  # of the runs, in which there is a tagger
TAGS_HELD = 6  # by one tagger at a time


def tagger(host: Host) -> None:
    """Tags times that since will pass soon, reads them later, and lets them go."""
    name = host.random.choice((MAIN, MAIN, COPIES))
    shard = host.open(name)
    own: dict[str, int] = {}
    while not host.run.stopping:  # it takes no operation from others
        with weathered(host, "tagger failed"):
            if len(own) < TAGS_HELD and host.random.random() < 0.5:
                _set(host, shard, own)
            elif own and host.random.random() < 0.8:
                _read(host, shard, *host.random.choice(sorted(own.items())))
            elif own:
                tag = host.random.choice(sorted(own))
                del own[tag]  # also where nobody knows whether it is gone
                shard.untag(tag)
                host.run.path("tag removed")
        host.sleep(0.7)


def _set(host: Host, shard: Shard, own: dict[str, int]) -> None:
    truth = host.run.truth(shard.name)
    low, high = truth.state.since.element, truth.state.upper.element
    if low is None or high is None or high <= low:
        return
    time = min(high - 1, low + host.random.randrange(4))
    host.run.numbers += 1
    tag = f"t{host.run.numbers}"
    try:
        expect(shard.tag(tag, at=time).time == time, "tagged", f"tag {tag} was set at another time than {time}")
    except NotReadable:
        since = max(truth.state.since, erased_from(truth.state))
        expect(not since.less_equal(time), "tagged", f"time {time} was refused before since had passed it")
        return
    except Conflict as error:
        expect(False, "tagged", f"a fresh name was taken: {error.message}")
    own[tag] = time
    host.run.path("tag set")


def _read(host: Host, shard: Shard, tag: str, time: int) -> None:
    """While the State has the tag its time is readable, wherever since is, and what it shows is exact."""
    truth = host.run.truth(shard.name)
    passed = not truth.state.since.less_equal(time)
    done = False
    with reading(host, shard.name, time):
        try:
            read_once(host, shard, time, pause_s=host.random.choice((0.0, 0.05, 1.5)))
        except NotReadable as error:
            expect(False, "tagged", f"tag {tag} keeps {time}, and a read was told: {error.message}")
        done = True
    if done and passed:
        host.run.path("tag read behind since")
    expect(tag in truth.state.tags, "tagged", f"tag {tag} at {time} is gone, and nobody took it away")


def read_tags(host: Host, name: str) -> None:
    """Every time that is tagged in the end reads as it should."""
    shard = host.client.shard(name)
    for time in sorted({tag.time for tag in host.run.truth(name).state.tags.values()}):
        read_once(host, shard, time, pause_s=0)
    expect(sorted(shard.tags()) == sorted(host.run.truth(name).state.tags), "tagged", f"{name} tells of other tags")


# --- broken builds


def advance_over_tag() -> Broken:
    """Merges bring all times before since to since, those that are tagged too."""
    return every(
        patch.object(compactor.worker, "kept_below", lambda state, since: ()),
        patch.object(persist.commit.blob_tasks, "kept_below", lambda state, since: ()),
    )


def advance_short_of_tag() -> Broken:
    """A time goes to the one before the tag, and that of the tag beyond it."""
    real = compactor.worker.kept_below
    shifted = lambda state, since: tuple(time - 1 for time in real(state, since) if time)  # noqa: E731
    return every(
        patch.object(compactor.worker, "kept_below", shifted),
        patch.object(persist.commit.blob_tasks, "kept_below", shifted),
    )


BROKEN = (advance_over_tag, advance_short_of_tag)
