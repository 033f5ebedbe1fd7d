"""Pipelined writers: each append lands once and in order, whatever happens to those who write."""

from __future__ import annotations

from collections import Counter

from persist.client.pipelined import PipelinedWriter, PipelineSettings
from persist.core.attribute import named_key
from persist.core.errors import AttributeMismatch, Corruption, Expired, OutcomeForgotten, PersistError
from tests.simulation.host import MAIN, WEATHER, Host, Run, expect_damage, expect_wrong_clock, extras_of, piped_rows
from tests.simulation.oracle import expect
from tests.simulation.writers import as_table

PIPES = ("north", "south")
SETTINGS = PipelineSettings(window_appends_max=6, retry_s=4.0)


def pipeliner(host: Host) -> None:
    """Appends without waiting, through a writer whose id others use as well; each opening ends the others."""
    shard = host.open(MAIN)
    task = host.run.world.scheduler.current
    assert task is not None
    name = task.local["pipe"] = host.random.choice(PIPES)
    extras = extras_of(shard)
    while host.work():
        try:
            acknowledged = host.run.acknowledged[name]
            writer = shard.pipelined_writer(name, SETTINGS)
        except (*WEATHER, Expired):
            host.sleep(0.5)
            continue
        except Corruption:
            expect_damage(host)
            continue
        first = writer.acknowledged
        expect(
            first >= acknowledged, "lost", f"append {acknowledged} of {name} was acknowledged, the shard has {first}"
        )
        _append(host, writer, extras)


def _append(host: Host, writer: PipelinedWriter, extras: tuple[str, ...]) -> None:
    """Appends until something ends the writer."""
    run, following = host.run, writer.acknowledged + 1
    try:
        for _ in range(host.random.randrange(1, 15)):
            if run.stopping:
                break
            rows = [(k, v, 0, d) for k, v, _, d in piped_rows(writer.name, following)]
            number = writer.append(as_table(rows, timed=False, extras=extras))
            expect(number == following, "piped", f"append {following} of {writer.name} is given the number {number}")
            following += 1
            if host.random.random() < 0.3:
                writer.flush()
                expect(writer.acknowledged == number, "piped", f"flushed {number}, acknowledged {writer.acknowledged}")
            _acknowledged(run, writer)
            host.sleep(host.random.choice((0.0, 0.1, 0.5)))
        if host.random.random() < 0.5:
            writer.close()
    except WEATHER:
        run.path("pipe broken")
    except (AttributeMismatch, Expired):
        run.path("pipe fenced")
    except OutcomeForgotten:
        expect_wrong_clock(host)
    except Corruption:
        expect_damage(host)
    except PersistError as error:
        expect(False, "piped", f"{writer.name} ends with {error!r}")
    finally:
        _acknowledged(run, writer)
    writer.abandon()


def _acknowledged(run: Run, writer: PipelinedWriter) -> None:
    run.acknowledged[writer.name] = max(run.acknowledged[writer.name], writer.acknowledged)
    if writer.acknowledged:
        run.path("append acknowledged")


def check_piped(run: Run) -> None:
    """Every append up to the number that the shard holds landed once, and after the one before it.

    A restore may take its rows back, or write them again.
    """
    truth = run.truth(MAIN)
    restores = [write for write in truth.landed.values() if write is not None and write.as_of is not None]
    taken = (write.landed for write in restores if write.landed is not None)
    restored = {lower for lower, upper in taken if lower != upper}  # one that had nothing to do took no time
    for name in PIPES:
        held = truth.attributes.values.get(str(named_key(f"pipelined writer {name}")), 0)
        acknowledged = run.acknowledged[name]
        expect(acknowledged <= held, "lost", f"append {acknowledged} of {name} was acknowledged, the shard has {held}")
        found = Counter({row[:2]: 0 for row in ()})
        times: dict[int, int] = {}
        for key, value, time, diff in truth.updates:
            if key.startswith(name) and time not in restored:
                found[key, value] += diff
                times[int(key.removeprefix(name))] = time
        expected = Counter((k, v) for number in range(1, held + 1) for k, v, _, _ in piped_rows(name, number))
        expect(
            found == expected,
            "piped",
            f"{name} landed {held} appends; {found - expected} too many, {expected - found} too few",
        )
        in_order = [times[number] for number in sorted(times)]
        expect(in_order == sorted(in_order), "piped", f"appends of {name} landed at the times {in_order}")


__all__ = ["check_piped", "pipeliner"]
