"""docs/inspect.md: its examples are run, and each row of what is wrong is provoked."""

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
from tests.support.answers import Answers
from tests.support.disaster import free_port
from tests.support.inspected import PART, ROLLUP, UNNAMED, copied, spoil_entry
from tests.support.pages import blocks, page
from tests.support.refused import check_refused, emptied, without

PAGE = "docs/inspect.md"
EXAMPLES = [block for block in blocks(PAGE) if block.language == "sh"]
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


def piped(place: Path) -> list[str]:
    (place / "consensus.db").unlink()
    os.mkfifo(place / "consensus.db")
    return at(place, "usage")


def truncated(place: Path) -> list[str]:
    (place / "consensus.db").rename(place / "consensus.db-wal")
    (place / "consensus.db").touch()
    return at(place, "usage")


def spoilt(place: Path) -> list[str]:
    shutil.rmtree(place / "blob" / ROLLUP.split("/")[0])
    spoil_entry(place, "orders", 1)
    return at(place, "state", "orders")


WRONG: dict[str, Callable[[Path], list[str]]] = {
    "a name that no shard can have": lambda p: at(p, "state", "a b"),
    "a name that is no shard": lambda p: at(p, "log", "nowhere"),
    "a pattern with characters that no name has": lambda p: at(p, "usage", "a b*"),
    "a pattern without `*`, `?` or `[` that is no shard": lambda p: at(p, "usage", "nowhere"),
    "a version that is no number, or 0": lambda p: at(p, "state", "orders", "--at", "vx"),
    "a version that is still to come": lambda p: at(p, "state", "orders", "--at", "35"),
    "a version that the log does not have any more": forgotten,
    "a timestamp without a zone": lambda p: at(p, "state", "orders", "--timestamp", "2026-11-23T12:05:03"),
    "a timestamp from before the log begins": lambda p: at(p, "state", "orders", "--timestamp", "2020-01-01T00:00:00Z"),
    "a version and a timestamp": lambda p: at(
        p, "state", "orders", "--at", "3", "--timestamp", "2026-11-24T00:00:00Z"
    ),
    "`--from` that is later than `--to`": lambda p: at(p, "log", "orders", "--from", "5", "--to", "4"),
    "changes whose first version is the later one": lambda p: at(p, "state", "orders", "--from", "5", "--at", "4"),
    "a part's key that is none": lambda p: at(p, "part", "abc"),
    "a part's key that is a bundle's": lambda p: at(p, "part", bundle(p)),
    "a part that is not there, and that nothing names": lambda p: at(p, "part", UNNAMED),
    "`--rows` below 0, or above 1,000": lambda p: at(p, "part", PART, "--rows", "1001"),
    "`--rows` of a part that nothing names": lambda p: at(p, "part", orphan(p), "--rows", "1"),
    "`--lower` or `--upper` that is no key of an attribute": lambda p: at(p, "attributes", "orders", "--lower", "abc"),
    "`--lower` that comes after `--upper`": lambda p: at(
        p, "attributes", "orders", "--lower", "8" * 32, "--upper", "7" * 32
    ),
    "`--as-of` that is no time": lambda p: at(p, "digest", "orders", "--as-of", "now"),
    "`--as-of` that is not complete yet": lambda p: at(p, "digest", "orders", "--as-of", "11"),
    "`--as-of` that history has forgotten": lambda p: at(p, "digest", "thrown", "--as-of", "0"),
    "a digest of a shard that was dropped": lambda p: at(p, "digest", "gone"),
    "`--dir` that is not there": lambda p: at(p / "nowhere", "usage"),
    "`--dir` without anything of persist": with_notes,
    "`--dir` whose log, or blobs, are not there": lambda p: at(without(p, "consensus.db"), "usage"),
    "`--dir` whose log is no regular file, such as a pipe": piped,
    "`--dir` whose log is empty, beside a write-ahead log": truncated,
    "`--dir` whose name is not UTF-8": lambda p: at(p / os.fsdecode(b"\xff"), "usage"),
    "an argument of where the shards are that is empty": lambda p: ["usage", "--dir", ""],
    "`--blob` without `--consensus`": lambda p: ["usage", "--blob", f"file://{p}/blob"],
    "`--blob` of a kind that is not known": lambda p: [
        "usage", "--blob", "ftp://host/a", "--consensus", f"sqlite:///{p}/consensus.db"
    ],
    "`--url` and `--dir`": lambda p: at(p, "usage", "--url", "http://127.0.0.1:1"),
    "`--url` that is none": lambda p: ["usage", "--url", "host:8787"],
    "`--url` with a user and a password": lambda p: ["usage", "--url", "http://user:secret@127.0.0.1:1"],
    "`--ca-file` that cannot be read, or without a server": lambda p: [
        "usage", "--url", "https://127.0.0.1:1", "--ca-file", f"{p}/nowhere"
    ],
    "`--url` where nobody answers": lambda p: ["usage", "--url", f"http://127.0.0.1:{free_port()}"],
    "`--url` of what is no server of persist": lambda p: ["usage", "--url", Answers(200, b"hello").url],
    "`--url` that redirects to another place": lambda p: [
        "usage", "--url", Answers(307, b"", location="http://127.0.0.1:1").url
    ],
    "a State of which nothing can be made": spoilt,
}  # fmt: skip
MORE: list[tuple[str, Callable[[Path], list[str]]]] = [
    ("a version that is no number, or 0", lambda p: at(p, "state", "orders", "--at", "0")),
    ("a version that is no number, or 0", lambda p: at(p, "state", "orders", "--at", "9" * 30)),
    ("a version that the log does not have any more", lambda p: forgotten(p, "log", "orders", "--to", "2")),
    ("a part's key that is none", lambda p: at(p, "part", ROLLUP)),
    ("`--as-of` that is no time", lambda p: at(p, "digest", "orders", "--as-of", "9" * 30)),
    ("`--url` that is none", lambda p: ["usage", "--url", "http://[::1"]),
]


def documented() -> dict[str, tuple[str, int]]:
    table = page(PAGE).partition("| what is asked |")[2]
    return {row: (kind, int(code)) for row, kind, code in re.findall(r"^\| (.+?) \| `(\w+)` \| (\d) \|$", table, re.M)}


def test_every_row_of_the_page_has_its_test() -> None:
    assert list(documented()) == list(WRONG)


@pytest.mark.parametrize(("row", "wrong"), [*WRONG.items(), *MORE])
def test_what_is_wrong_is_one_sentence_with_its_exit_code(
    row: str,
    wrong: Callable[[Path], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = wrong(copied(tmp_path / "location"))
    check_refused("inspect", arguments, documented()[row], capsys, monkeypatch)


def test_an_argument_that_is_not_known_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["rows", "orders"], ["state"], ["usage", "--more"]):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", *words])
        assert ended.value.code == 2
    assert "usage: persist inspect" in capsys.readouterr().err
