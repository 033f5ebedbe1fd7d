"""`persist inspect` in docs/check.md: its examples are run, and every kind of error that it lists is provoked."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist.inspect.queries import ANSWERS
from rpc.cli.program import main
from tests.support.disaster import free_port
from tests.support.inspected import PART, ROLLUP, UNNAMED, copied, spoil_entry
from tests.support.pages import blocks, exit_codes, page
from tests.support.refused import check_refused, emptied, without

PAGE = "docs/check.md"
EXAMPLES = [block for block in blocks(PAGE) if block.language == "sh" and "persist inspect" in block.text]
SCHEMA = pa.schema([("id", pa.int64())])


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_the_page_prints_what_it_says(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, example = copied(tmp_path / "location"), EXAMPLES[number]
    for line in example.text.splitlines():
        words = shlex.split(line)
        assert words[0] == "persist"
        assert main([str(place) if word == "DIR" else word for word in words[1:]]) == 0, line
    if example.prints is not None:
        assert capsys.readouterr().out == example.prints


def test_the_page_names_every_command() -> None:
    table = page(PAGE).partition("| command |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z-]+) ", table)) == set(ANSWERS)


# --- what is wrong


def at(place: Path, *words: str) -> list[str]:
    return [*words, "--dir", str(place)]


def forgotten(place: Path, *words: str) -> list[str]:
    """The log of a shard that was collected."""
    shutil.rmtree(place)
    with persist.connect(f"persist://{place}", collect=False) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"], history="none")
        for number in range(80):
            shard.insert([{"id": number}])
    assert main(["maintain", "gc", "--once", "--dir", str(place)]) == 0
    return at(place, *(words or ("state", "orders", "--at", "3")))


def bundle(place: Path) -> str:
    [first, *_] = sorted((place / "blob").rglob("*.bundle"))
    return str(first.relative_to(place / "blob"))


def orphan(place: Path) -> str:
    """A part's blob that no State names."""
    key = UNNAMED
    (place / "blob" / key).write_bytes((place / "blob" / PART).read_bytes())
    return key


def with_notes(place: Path) -> list[str]:
    (emptied(place) / "notes.txt").write_text("")
    return at(place, "usage")


def spoilt(place: Path) -> list[str]:
    shutil.rmtree(place / "blob" / ROLLUP.split("/")[0])
    spoil_entry(place, "orders", 1)
    return at(place, "state", "orders")


WRONG: dict[str, Callable[[Path], list[str]]] = {
    "an invalid name": lambda p: at(p, "state", "a b"),
    "an unknown shard": lambda p: at(p, "log", "nowhere"),
    "a pattern with invalid characters": lambda p: at(p, "usage", "a b*"),
    "a pattern without wildcards that matches no shard": lambda p: at(p, "usage", "nowhere"),
    "a version that is not a positive number": lambda p: at(p, "state", "orders", "--at", "vx"),
    "a future version": lambda p: at(p, "state", "orders", "--at", "35"),
    "a version that the log no longer has": forgotten,
    "a timestamp without a zone": lambda p: at(p, "state", "orders", "--timestamp", "2026-11-23T12:05:03"),
    "a timestamp before the log begins": lambda p: at(p, "state", "orders", "--timestamp", "2020-01-01T00:00:00Z"),
    "a version and a timestamp": lambda p: at(
        p, "state", "orders", "--at", "3", "--timestamp", "2026-11-24T00:00:00Z"
    ),
    "`--from` after `--to`": lambda p: at(p, "log", "orders", "--from", "5", "--to", "4"),
    "`--from` after `--at`": lambda p: at(p, "state", "orders", "--from", "5", "--at", "4"),
    "a key that is not that of a part": lambda p: at(p, "part", "abc"),
    "the key of a bundle": lambda p: at(p, "part", bundle(p)),
    "a part that does not exist": lambda p: at(p, "part", UNNAMED),
    "`--rows` above 1,000": lambda p: at(p, "part", PART, "--rows", "1001"),
    "`--rows` of an unreferenced part": lambda p: at(p, "part", orphan(p), "--rows", "1"),
    "`--lower` is no key of an attribute": lambda p: at(p, "attributes", "orders", "--lower", "abc"),
    "`--lower` after `--upper`": lambda p: at(
        p, "attributes", "orders", "--lower", "8" * 32, "--upper", "7" * 32
    ),
    "`--as-of` is no time": lambda p: at(p, "digest", "orders", "--as-of", "now"),
    "`--as-of` is not complete": lambda p: at(p, "digest", "orders", "--as-of", "11"),
    "`--as-of` before since": lambda p: at(p, "digest", "thrown", "--as-of", "0"),
    "a digest of a dropped shard": lambda p: at(p, "digest", "gone"),
    "`--dir` does not exist": lambda p: at(p / "nowhere", "usage"),
    "`--dir` without files of persist": with_notes,
    "`--dir` without its log or blobs": lambda p: at(without(p, "consensus.db"), "usage"),
    "`--dir` whose name is not UTF-8": lambda p: at(p / os.fsdecode(b"\xff"), "usage"),
    "an empty `--dir`": lambda p: ["usage", "--dir", ""],
    "`--blob` without `--consensus`": lambda p: ["usage", "--blob", f"file://{p}/blob"],
    "`--blob` of an unknown scheme": lambda p: [
        "usage", "--blob", "ftp://host/a", "--consensus", f"sqlite:///{p}/consensus.db"
    ],
    "`--url` and `--dir`": lambda p: at(p, "usage", "--url", "http://127.0.0.1:1"),
    "an invalid `--url`": lambda p: ["usage", "--url", "host:8787"],
    "`--ca-file` cannot be read": lambda p: [
        "usage", "--url", "https://127.0.0.1:1", "--ca-file", f"{p}/nowhere"
    ],
    "`--url` without a server": lambda p: ["usage", "--url", f"http://127.0.0.1:{free_port()}"],
    "a State that cannot be built": spoilt,
}  # fmt: skip
MORE: list[tuple[str, Callable[[Path], list[str]]]] = [
    ("a version that is not a positive number", lambda p: at(p, "state", "orders", "--at", "0")),
    ("a version that is not a positive number", lambda p: at(p, "state", "orders", "--at", "9" * 30)),
    ("a key that is not that of a part", lambda p: at(p, "part", ROLLUP)),
    ("`--as-of` is no time", lambda p: at(p, "digest", "orders", "--as-of", "9" * 30)),
    ("an invalid `--url`", lambda p: ["usage", "--url", "http://[::1"]),
]


KINDS = {
    "an unknown shard": "unknown_shard",
    "a pattern without wildcards that matches no shard": "unknown_shard",
    "a digest of a dropped shard": "unknown_shard",
    "a version that the log no longer has": "not_readable",
    "a timestamp before the log begins": "not_readable",
    "`--as-of` before since": "not_readable",
    "`--dir` without its log or blobs": "unavailable",
    "`--url` without a server": "unavailable",
    "a State that cannot be built": "corruption",
}
CODES = exit_codes(PAGE)


def test_the_page_has_every_kind_of_error() -> None:
    assert set(KINDS) <= set(WRONG)
    assert set(KINDS.values()) <= CODES.keys()


@pytest.mark.parametrize(("row", "wrong"), [*WRONG.items(), *MORE])
def test_what_is_wrong_is_one_sentence_with_its_exit_code(
    row: str,
    wrong: Callable[[Path], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = wrong(copied(tmp_path / "location"))
    check_refused("inspect", arguments, (kind := KINDS.get(row, "invalid_usage"), CODES[kind]), capsys, monkeypatch)
