"""`persist cost`: what a location holds and did, and what processes have asked of its store, priced. Writes nothing."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from persist.cli import cost_table, inspect_far
from persist.cli.inspect import FOUND, HEALTHY, exit_of, look_of
from persist.cli.screen import complain, texts_of
from persist.cli.where import TOKEN, check_given, token_of_environment, trust_of, url_of
from persist.cli.where import add_arguments as add_where
from persist.client.regular_file import read_bounded
from persist.core.errors import InvalidUsage, PersistError, Unavailable
from persist.cost.document import CostDocument, cost_document
from persist.cost.metered import Metered, metered, together
from persist.cost.priced import MeteredTold, metered_told
from persist.cost.prices import EXAMPLE, Prices, built_in, read_prices
from persist.inspect.records import Findings

DAYS = 7.0
DAYS_MAX = 3_660.0
WATCH_S_MAX = 7 * 86_400.0
SCRAPES_MAX = 2  # of one process, one after the other
SCRAPE_BYTES_MAX = 64 * 1024 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="", metavar="PATTERN", help="a name, or eu/*; without it all")
    add_where(parser)
    parser.add_argument("--days", metavar="N", default=f"{DAYS:g}", help="what was done since so many days (default 7)")
    parser.add_argument("--prices", metavar="FILE", help="a table of prices in the place of S3 Standard's")
    parser.add_argument("--prices-example", action="store_true", help="print such a table, and do nothing else")
    parser.add_argument("--by-day", action="store_true", help="a line for each shard and day")
    parser.add_argument(
        "--url", action="append", metavar="URL", help=f"what this process has counted; its token in {TOKEN}; repeatable"
    )
    parser.add_argument("--ca-file", metavar="FILE", help="PEM file of whom to trust, for --url https://…")
    parser.add_argument("--watch", metavar="SECONDS", help="with --url: only what comes in so long a time")
    parser.add_argument(
        "--scrape",
        action="append",
        metavar="FILE",
        help="metrics that were saved; a second, later file: the difference",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; docs/cost.md has its schema")


def run(arguments: argparse.Namespace) -> int:
    """0: all was told. 1: something is damaged or missing. 2: wrong usage. 3: a store, or a server, does not answer."""
    if arguments.prices_example:
        print(EXAMPLE, end="")
        return HEALTHY
    try:
        document = _answered(arguments)
    except PersistError as error:
        complain("persist cost", error.message, texts_of(arguments))
        return exit_of(error)
    lines = document.pieces() if arguments.json else cost_table.lines(document, by_day=arguments.by_day)
    for line in lines:
        sys.stdout.write(line)
    return FOUND if document.findings else HEALTHY


def _answered(arguments: argparse.Namespace) -> CostDocument:
    check_given(arguments, "dir", "blob", "consensus", "ca_file", "prices", "watch")
    days = _number("days", arguments.days, DAYS_MAX)
    watch_s = None if arguments.watch is None else _number("watch", arguments.watch, WATCH_S_MAX)
    urls = _urls(arguments)
    if watch_s is not None and not urls:
        raise InvalidUsage("--watch needs --url: what is watched is what a process counts")
    if len(arguments.scrape or ()) > SCRAPES_MAX:
        raise InvalidUsage(f"--scrape is given more than {SCRAPES_MAX} times: give one file, or an earlier and a later")
    if arguments.scrape and arguments.url:
        raise InvalidUsage("--scrape and --url are both given: give files, or processes to ask")
    prices = built_in() if arguments.prices is None else read_prices(Path(arguments.prices))
    counted = _metered(arguments, urls, watch_s, prices)
    has_stores = any((arguments.dir, arguments.blob, arguments.consensus))
    if counted is not None and not has_stores:
        if arguments.name:
            raise InvalidUsage("metrics tell of no single shard: give --dir, or --blob and --consensus, with a pattern")
        return CostDocument(prices, metered=counted, findings=Findings())
    with closing(look_of(arguments)) as look:
        document = cost_document(look, arguments.name or None, days, prices)
    document.metered = counted
    return document


def _number(name: str, text: str, most: float) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= most:
        raise InvalidUsage(f"--{name} is {text!r:.60}; it must be a number above 0, and at most {most:g}")
    return found


def _urls(arguments: argparse.Namespace) -> list[str]:
    """The processes that are asked. Without stores and files those of the environment are."""
    given: list[str] = arguments.url or []
    if "" in given:
        raise InvalidUsage("--url is empty: give a value, or leave it out")
    if not given and not arguments.scrape:
        found = url_of(argparse.Namespace(**{**vars(arguments), "url": None}))
        given = [] if found is None else [found]
    if arguments.ca_file and not given:
        raise InvalidUsage("--ca-file is for a server: give --url")
    return [one for url in given for one in url.split(",")]


def _metered(
    arguments: argparse.Namespace, urls: list[str], watch_s: float | None, prices: Prices
) -> MeteredTold | None:
    """What processes have counted; None: nobody was asked."""
    if urls:
        servers = [inspect_far.Server(url, token_of_environment(), trust_of(arguments)) for url in urls]
        found, seconds = _watched(lambda: _asked(servers, urls), watch_s)
        return metered_told(found, urls, seconds, prices)
    if arguments.scrape:
        texts = [metered(_read(Path(path)), Path(path).name) for path in arguments.scrape]
        found = texts[0] if len(texts) == 1 else texts[1].since(texts[0])
        return metered_told(found, [Path(path).name for path in arguments.scrape], None, prices)
    return None


def _asked(servers: list[inspect_far.Server], urls: list[str]) -> Metered:
    found = []
    for server, url in zip(servers, urls, strict=True):
        text = server.metrics()
        try:
            found.append(metered(text, url))
        except InvalidUsage as error:  # the question was right, the answer is none
            raise Unavailable(f"{url} does not tell what it counts of its stores: {error.message}") from error
    return together(found)


def _watched(ask: Callable[[], Metered], watch_s: float | None) -> tuple[Metered, float | None]:
    first, began = ask(), time.monotonic()
    if watch_s is None:
        return first, None
    time.sleep(watch_s)
    return ask().since(first), time.monotonic() - began


def _read(path: Path) -> str:
    return read_bounded(f"the metrics {str(path)!r:.200}", path, SCRAPE_BYTES_MAX).decode("utf-8", "replace")
