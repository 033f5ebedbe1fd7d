"""Measure what README.md and bench/results/README.md publish, and write both from the results.

    python -m bench.figures [--only NAME ...]     measure, keep the results in bench/results, write the pages
    python -m bench.figures --pages               only write the pages

Each of `RUNS` is one command whose lines `BAR <name>: <value> (want <bound>) ok|short` are the figures. A result names
the date, the commit and the machine; a checkout with uncommitted changes of the product is refused, since no commit
would name what was measured. A run that fails, or prints no bar, leaves its last result as it is.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "bench" / "results" / "README.md"
README = ROOT / "README.md"
MARKS = ("<!-- figures: written by `make figures` -->\n", "<!-- end of figures -->\n")
PRODUCT = ("persist", "blob", "consensus", "rpc", "compactor", "pyspark_persist")
BAR = re.compile(r"BAR (?P<name>.+): (?P<value>\S+) \(want (?P<want>(?:<=|>=) \S+)\) (?:ok|short)")
COMMIT_LETTERS = 8


class Bar(msgspec.Struct, frozen=True):
    """One figure: `want` is like `<= 1.3`."""

    name: str
    value: float
    want: str

    @property
    def holds(self) -> bool:
        relation, bound = self.want.split()
        return self.value <= float(bound) if relation == "<=" else self.value >= float(bound)


class Result(msgspec.Struct, frozen=True):
    """What one run measured. `seconds` is how long the run took."""

    date: str
    commit: str
    machine: str
    command: str
    seconds: int
    bars: tuple[Bar, ...]
    printed: tuple[str, ...]  # the other lines, which have the absolute times

    def value(self, name: str) -> float:
        """Raises KeyError if the run has no such bar."""
        return {bar.name: bar.value for bar in self.bars}[name]


class Run(msgspec.Struct, frozen=True):
    """A command to run: the module of `bench` and its arguments; `title` heads its table."""

    name: str
    title: str
    arguments: str
    about: str = ""

    @property
    def command(self) -> str:
        return f"python -m bench.{self.arguments}"


class Line(msgspec.Struct, frozen=True):
    """A row of README's table: `figure` has a `{}` for the value of each of the `bars` of the run."""

    what: str
    figure: str
    run: str
    bars: tuple[str, ...]


RUNS = (
    Run(
        "appends",
        "Appends of 100 rows",
        "service --only small",
        "One writer; SQLite and files. deltalake and PyIceberg append the same rows to their tables; the raw\n"
        "compare-and-set is one insert of the same bytes into SQLite, with fsync.",
    ),
    Run(
        "writers",
        "Many writers of one shard",
        "service --only writers",
        "64 processes insert 100 rows each into one shard over HTTP, as fast as they can.",
    ),
    Run("listen", "From an append to a listener", "service --only listen", "The listener is another process."),
    Run(
        "kill",
        "A server is killed",
        "service --only kill",
        "One of two servers is killed with `kill -9` while a client inserts.",
    ),
    Run(
        "idle",
        "Idle shards and listeners",
        "service --only idle --idle-seconds 60",
        "10,000 shards and 2,000 listeners at one server; nobody writes.",
    ),
    Run(
        "core",
        "A long history",
        "core",
        "A commit, and opening the shard, after 20,000 commits beside the same after 10, with maintenance.",
    ),
    Run("stores", "The stores", "stores", "Beside the plain drivers: one insert of the same bytes, boto3."),
    Run(
        "tables",
        "Upserts, deletes, lookups",
        "tables --rows 2000000",
        "2 million rows, 1,000 keys an upsert. The ratios are times, beside the same verbs of deltalake and\n"
        "PyIceberg on the same disk.",
    ),
    Run(
        "crowd",
        "Many writers, readers and tokens",
        "crowd",
        "A commit beside 10,000 readers or 1,000,000 tokens, over one beside ten.",
    ),
    Run(
        "reads",
        "Reads",
        "speed.reads",
        "Beside each read pyarrow reads the same columns of the same files, and DuckDB groups them. The ratios\n"
        "are speeds: 1 is as fast.",
    ),
    Run(
        "compaction",
        "Compaction",
        "speed.compaction",
        "10 million updates under 1 GiB, beside DuckDB's COPY, two threads each. The ratio is one of speeds.",
    ),
    Run(
        "spark",
        "PySpark",
        "spark --only write,read,stream",
        "10 million rows over HTTP, `local[2]`. The ratios are speeds beside the plainest Python data source.",
    ),
)
LINES = (
    Line(
        "append 100 rows over HTTP",
        "deltalake takes {} times as long, PyIceberg {} times (500 commits each)",
        "appends",
        ("deltalake append / HTTP append", "PyIceberg append / HTTP append"),
    ),
    Line(
        "64 processes insert into one shard",
        "{} times the commits of deltalake; {} rows lost or doubled",
        "writers",
        ("inserts/s / deltalake's commits/s", "rows lost or doubled"),
    ),
    Line(
        "from an append to a listener in another process",
        "{} times the append itself",
        "listen",
        ("SQLite: append to listen / append",),
    ),
    Line(
        "one of two servers is killed under load",
        "{} errors, {} rows lost; the slowest insert took {} s",
        "kill",
        ("errors when one of two servers is killed", "acknowledged rows lost or doubled", "longest insert, s"),
    ),
    Line(
        "a commit after 20,000 commits",
        "{} times the cost of one after 10",
        "core",
        ("append, 20000 commits to 10",),
    ),
)

HEAD = """\
# Figures

`make figures` measures these and writes this page and README's table from `bench/results`. A test compares
them. A ratio compares two things that were measured side by side in one run. Absolute times depend on the
machine, ratios much less. A figure that misses its aim is marked as short.

Other benchmarks take longer, and their figures are not kept here: `make help` lists them.
"""


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def commit() -> str:
    """The commit that is checked out. Exits if the product differs from it."""
    changed = _git("status", "--porcelain", "--", *PRODUCT)
    if changed:
        sys.exit(f"the product has changes that no commit names; commit them first:\n{changed}")
    return _git("rev-parse", "HEAD")[:COMMIT_LETTERS]


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def bars_of(lines: Iterable[str]) -> Iterator[Bar]:
    for line in lines:
        if match := BAR.match(line):
            yield Bar(match["name"], float(match["value"]), match["want"])


def measure(run: Run, at: str) -> bool:
    """Run the command and keep its result. Whether there is one."""
    print(f"--- {run.command}", flush=True)
    started = time.monotonic()
    printed: list[str] = []
    with subprocess.Popen(
        (sys.executable, *shlex.split(run.command)[1:]), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line.rstrip())
    bars = tuple(bars_of(printed))
    others = tuple(line for line in printed if line and not line.startswith(("BAR ", "---")))
    if process.returncode or not bars:
        print(f"{run.command} ended with exit code {process.returncode} and {len(bars)} bars: not kept", flush=True)
        return False
    today = datetime.now(UTC).date().isoformat()
    result = Result(today, at, machine(), run.command, round(time.monotonic() - started), bars, others)
    RESULTS.mkdir(exist_ok=True)
    _path(run.name).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return True


def _path(name: str) -> Path:
    return RESULTS / f"{name}.json"


def results() -> dict[str, Result]:
    """The kept results by the name of their run, in the order of `RUNS`."""
    kept = (run.name for run in RUNS if _path(run.name).exists())
    return {name: msgspec.json.decode(_path(name).read_bytes(), type=Result) for name in kept}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2g}"


def page(kept: dict[str, Result]) -> str:
    """bench/results/README.md."""
    return HEAD + "".join(_section(run, kept[run.name]) for run in RUNS if run.name in kept)


def _section(run: Run, result: Result) -> str:
    rows = "".join(
        f"| {bar.name} | {_number(bar.value)} | {bar.want}{'' if bar.holds else ', short'} |\n" for bar in result.bars
    )
    printed = "".join(f"    {line}\n" for line in result.printed)
    return (
        f"\n## {run.title}\n\n{run.about}\n\n| what | figure | aim |\n| --- | --- | --- |\n{rows}\n{printed}\n"
        f"`{result.command}`, {result.date}, commit `{result.commit}`; {result.machine}.\n"
    )


def readme(text: str, kept: dict[str, Result]) -> str:
    """README.md with its table of figures written anew. Raises ValueError if the marks are missing."""
    before, _, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        raise ValueError("README.md has no place for the figures")
    rows = "".join(_row(line, kept[line.run]) for line in LINES if line.run in kept)
    table = f"| what | figure | command |\n| --- | --- | --- |\n{rows}" if rows else ""
    return f"{before}{MARKS[0]}{table}{end}{after}"


def _row(line: Line, result: Result) -> str:
    figure = line.figure.format(*(_number(result.value(name)) for name in line.bars))
    return f"| {line.what} | {figure} | `{result.command}`, {result.date}, `{result.commit}` |\n"


def write_pages() -> None:
    kept = results()
    PAGE.write_text(page(kept), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8"), kept), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [run.name for run in RUNS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--pages", action="store_true", help="measure nothing, only write the pages")
    arguments = parser.parse_args()
    failed: list[str] = []
    if not arguments.pages:
        at = commit()
        failed = [run.name for run in RUNS if run.name in arguments.only and not measure(run, at)]
    write_pages()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
