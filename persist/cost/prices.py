"""The table of prices: the built-in one is S3 Standard's, and a file of one's own takes its place as a whole.

A gigabyte is 2**30 bytes, as S3 bills it. Requests are priced by the thousand, bytes by the gigabyte.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persist.client.regular_file import read_bounded
from persist.core.errors import InvalidUsage
from persist.inspect.records import Told

GB = 2**30
FILE_BYTES_MAX = 64 * 1024
NAME_CHARS_MAX = 100
PRICE_MIN, PRICE_MAX = 1e-12, 1e9  # what a little money buys stays a number
EXAMPLE = """\
# Prices for `persist cost --prices FILE`. All of them have to be given; 0.0 is free.
name = "S3 Standard, us-east-1"
currency = "USD"

[requests]       # 1,000 of them
put = 0.005      # PUT, COPY, POST, and each part of an upload
list = 0.005
get = 0.0004     # GET and HEAD
delete = 0.0

[bytes]          # 1 GB, which is 2^30 bytes
month = 0.023    # kept for a month
in = 0.0         # sent to the store
out = 0.0        # read from the store; free within a region

[log_store]      # the consensus store, such as a database: give what yours costs
month = 0.0      # a month
commits = 0.0    # 1,000 commits
"""

# Where each price stands in the file, in the order of the fields of Prices.
_PLACES = (
    ("requests", "put"),
    ("requests", "list"),
    ("requests", "get"),
    ("requests", "delete"),
    ("bytes", "month"),
    ("bytes", "in"),
    ("bytes", "out"),
    ("log_store", "month"),
    ("log_store", "commits"),
)
_TEXTS = ("name", "currency")
_SECTIONS = frozenset(section for section, _ in _PLACES)


@dataclass(frozen=True, slots=True)
class Prices(Told):
    """What is paid: `put`, `list`, `get` and `delete` for 1,000 requests, `gb_month` for a GB kept for a month.

    `gb_in` and `gb_out` are for a GB sent to the store and read from it, `log_month` for a month of the log store,
    `log_commits` for 1,000 commits. `source` is `built in`, or the file.
    """

    name: str
    currency: str
    source: str
    put: float
    list: float
    get: float
    delete: float
    gb_month: float
    gb_in: float
    gb_out: float
    log_month: float
    log_commits: float

    def requests(self, kind: str, count: int) -> float:
        """What so many requests of a kind cost: `put`, `list`, `get` or `delete`."""
        each: float = getattr(self, kind)
        return count * each / 1_000

    def puts(self, requests: int, size: int) -> float:
        """What it costs to put `size` bytes by so many requests."""
        return self.requests("put", requests) + size / GB * self.gb_in

    def gets(self, requests: int, size: int) -> float:
        """What it costs to get `size` bytes by so many requests."""
        return self.requests("get", requests) + size / GB * self.gb_out

    def month(self, size: int) -> float:
        """What it costs to keep so many bytes for a month."""
        return size / GB * self.gb_month


def built_in() -> Prices:
    """S3 Standard in us-east-1, first 50 TB a month."""
    return prices_of(tomllib.loads(EXAMPLE), "built in")


def read_prices(path: Path) -> Prices:
    """The table in a TOML file. Raises InvalidUsage: it cannot be read, or a price is missing, wrong or unknown."""
    data = read_bounded(f"the prices {str(path)!r:.200}", path, FILE_BYTES_MAX)
    try:
        given = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise InvalidUsage(f"the prices {str(path)!r:.200} are no TOML: {said:.200}") from error
    return prices_of(given, path.name)


def prices_of(given: Mapping[str, Any], source: str) -> Prices:
    """The table as a file says it. Raises InvalidUsage."""
    if unknown := sorted(given.keys() - _SECTIONS - set(_TEXTS)):
        raise InvalidUsage(f"the prices name {unknown[0]!r:.60}, which is none: --prices-example shows all")
    for section in _SECTIONS:
        table = given.get(section, {})
        if not isinstance(table, Mapping):
            raise InvalidUsage(f"the prices have {section} without prices in it: --prices-example shows how")
        if unknown := sorted(name for name in table if (section, name) not in _PLACES):
            raise InvalidUsage(f"the prices name {section}.{unknown[0]:.60}, which is none: --prices-example shows all")
    name, currency = (_text(given, name) for name in _TEXTS)
    numbers = [_price(given, *place) for place in _PLACES]
    return Prices(name, currency, source, *numbers)


def _text(given: Mapping[str, Any], name: str) -> str:
    text = given.get(name)
    if not isinstance(text, str) or not 0 < len(text) <= NAME_CHARS_MAX or not text.isprintable():
        raise InvalidUsage(f"the prices need a {name}: a text of 1 to {NAME_CHARS_MAX} printable characters")
    return text


def _price(given: Mapping[str, Any], section: str, name: str) -> float:
    price = given.get(section, {}).get(name)
    if price is None:
        raise InvalidUsage(f"the prices lack {section}.{name}: give it, 0.0 if it is free")
    if isinstance(price, bool) or not isinstance(price, (int, float)):
        raise InvalidUsage(f"the price {section}.{name} is {price!r:.60}; it must be a number")
    if price != 0 and not PRICE_MIN <= price <= PRICE_MAX:
        raise InvalidUsage(
            f"the price {section}.{name} is {price!r:.60}; it must be 0, or in [{PRICE_MIN:g}, {PRICE_MAX:.0f}]"
        )
    return float(price)
