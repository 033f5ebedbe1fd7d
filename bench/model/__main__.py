"""Throughput, latency and cost of a million shards on a hundred servers, by a simulation that is checked here.

    python -m bench.model [--rounds 3] [--seconds 4] [--few 4] [--servers 4] [--writers 16]

First the costs of an insert of 20 rows (NDJSON over HTTP) are measured on this machine, with one server and a lone
writer, then a few (`bench.model.measured`). From these alone the simulation predicts `--servers` servers with
`--writers` writers over PostgreSQL, and then such a run is made: the bars compare the two, each the median of the
rounds. What others do on the machine during a run is measured, and simulated as a process that competes. A round in
which they keep more than a tenth of a core busy is shown, and counts only if no round was quiet: what they do to the
slowest answers is no work of ours.

Then the same simulation, with the costs of the last round, answers for worlds that are larger (`bench.model.world`).
The costs that it is fed with follow the code: who makes an insert cheaper sees here what that brings.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench.bars import bar, median
from bench.cost import S3_STANDARD
from bench.model.measured import Calibrated, calibrated, neighbours, predicted
from bench.model.real import Measured, run, servers
from bench.model.service import Ran
from bench.model.world import ETCD, GIB, PACED, POSTGRES, SOURCES, World, answers, bill, log_bytes
from tests.services.postgres import Postgres, start_postgres

BOUND = "<= 0.25"
QUIET_CORES = 0.1  # that others may keep busy
TRIES = 3  # times as many rounds, where others do not let the machine be quiet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--few", type=int, default=4, help="writers with whom costs are measured")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--writers", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-model-") as directory:
        root = Path(directory)
        root.chmod(0o755)  # PostgreSQL runs as a user of its own
        postgres = start_postgres(root / "postgres")
        try:
            costs = check(root, postgres, arguments)
        finally:
            postgres.stop()
    print("\nparameters of the world that are not measured here")
    for name, value, source in SOURCES:
        print(f"  {name:14} {value:8} {source}")
    for world in (POSTGRES, ETCD):
        tell(world, costs)


def check(root: Path, postgres: Postgres, arguments: argparse.Namespace) -> Calibrated:
    """Predict and measure, round by round; the bars. The costs of the last round."""
    rounds: list[tuple[bool, float, float]] = []
    while sum(quiet for quiet, _, _ in rounds) < arguments.rounds and len(rounds) < TRIES * arguments.rounds:
        number = len(rounds)
        few, many = root / f"few{number}", root / f"many{number}"
        few.mkdir()
        many.mkdir()
        costs = calibrated(few, postgres, arguments.seconds, arguments.few)
        _tell_costs(costs)
        _beside("one server, one writer", costs.lone, _predicted(costs, costs.lone, 1, 1))
        _beside(f"one server, {arguments.few} writers", costs.few, _predicted(costs, costs.few, 1, arguments.few))
        with servers(many, postgres, arguments.servers) as running:
            real = run(running, postgres, arguments.writers, arguments.seconds, "many")
        model = _predicted(costs, real, arguments.servers, arguments.writers)
        _beside(f"{arguments.servers} servers, {arguments.writers} writers", real, model)
        quiet = max(map(neighbours, (costs.lone, costs.few, real))) <= QUIET_CORES
        rounds.append((quiet, model.per_s / real.per_s, model.p99_s / real.p99_s))
    counted = [one for one in rounds if one[0]] or rounds
    print(f"{len(rounds)} rounds, of which {sum(quiet for quiet, _, _ in rounds)} had at most {QUIET_CORES} cores busy")
    for name, ratios in (("throughput", [one[1] for one in counted]), ("p99", [one[2] for one in counted])):
        print(f"model's {name} / real, round by round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
        bar(f"model's {name} / real, less 1", abs(median(ratios) - 1), BOUND)
    return costs


def _predicted(costs: Calibrated, real: Measured, count: int, writers: int) -> Ran:
    """`real` only tells for how long, and what others did on the machine meanwhile."""
    return predicted(costs.costs, count, writers, real.seconds, neighbours(real))


def _tell_costs(found: Calibrated) -> None:
    costs = found.costs
    shown = {
        "before the commit": costs.front_s,
        "commit": costs.commit_s + costs.command_s,
        "answer": costs.answer_s,
        "system": costs.kernel_s,
        "upkeep": costs.upkeep_s,
        "client": costs.client_s,
        "PostgreSQL, a commit": costs.store_s,
        "a server that hears of another's": found.heard_s,
    }
    print("\nmicroseconds of CPU an insert: " + ", ".join(f"{name} {s * 1e6:.0f}" for name, s in shown.items()))
    print(
        f"  a flush {costs.flush_s * 1e6:.0f}, a blob {costs.blob_s * 1e6:.0f} microseconds; an insert makes", end=" "
    )
    print(f"{costs.commits:.2f} commits, {costs.puts:.2f} blobs, {found.log_bytes:,.0f} B of log", end=", ")
    print(f"{found.blob_bytes:,.0f} B in blobs")


def _beside(what: str, real: Measured, model: Ran) -> None:
    print(
        f"  {what:24} real {real.per_s:6.0f}/s, p50 {real.p50_s * 1e3:6.2f}, p99 {real.p99_s * 1e3:6.2f} ms", end="; "
    )
    print(f"model {model.per_s:6.0f}/s, p50 {model.p50_s * 1e3:6.2f}, p99 {model.p99_s * 1e3:6.2f} ms", end="; ")
    print(f"others kept {neighbours(real):.2f} cores busy", flush=True)


def tell(world: World, costs: Calibrated) -> None:
    """What the model answers about this world."""
    print(f"\n{world.name}: {world.shards:,} shards, {world.writers:,} writers, {world.servers:,} servers", flush=True)
    for answer in answers(world, costs):
        most, paced = answer.most, answer.paced
        of_day = bill(paced, costs, S3_STANDARD)
        print(f"\n  {answer.what}")
        print(f"    writers never pause: {most.per_s:,.0f} inserts/s, p99 {most.p99_s * 1e3:,.0f} ms", end="; in use: ")
        print(", ".join(f"{name} {part:.0%}" for name, part in most.used.items()))
        print(f"    bottleneck: {answer.bottleneck}; of the servers' work {answer.hearing:.0%} is to hear of others")
        print(f"    at {PACED:.0%}: {paced.per_s:,.0f} inserts/s, p50 {paced.p50_s * 1e3:.1f} ms", end=", ")
        print(f"p99 {paced.p99_s * 1e3:.1f} ms; {of_day.total:,.0f} USD a day", end=" ")
        print(f"({of_day.puts:,.0f} for PUTs, {of_day.kept:,.0f} to keep for a month what it wrote)", flush=True)
    size = log_bytes(world, costs)
    most_bytes = "" if world.log_bytes_max is None else f", of which it should hold {world.log_bytes_max / GIB:.0f}"
    print(f"  logs of all shards: at most {size / GIB:,.0f} GiB{most_bytes}", flush=True)


if __name__ == "__main__":
    main()
