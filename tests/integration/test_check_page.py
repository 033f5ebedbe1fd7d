"""docs/check.md: a heading for every finding, its examples are run, every kind of error is provoked."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist.check.check_runner import Report
from persist.check.findings import AGES, IDS, CheckThresholds
from persist.inspect import readonly_location
from rpc.cli.program import main
from tests.support.inspected import FixedClock, copied, everything, undated
from tests.support.pages import blocks, exit_codes, page
from tests.support.refused import check_refused, without
from tests.test_pages import anchors

PAGE = "docs/check.md"
GOLDEN = Path(__file__).parent / "checked"
EXAMPLES = [block for block in blocks(PAGE) if block.language == "sh" and "persist check" in block.text]
SCHEMA = pa.schema([("id", pa.int64())])
FOUND = 1


# --- headings


def headings() -> list[str]:
    return re.findall(r"^### (.+)$", page(PAGE).partition("## Findings")[2], re.MULTILINE)


def test_every_finding_has_its_heading_and_every_heading_a_finding() -> None:
    assert headings() == list(IDS)
    assert set(IDS) <= anchors(page(PAGE))


def test_the_page_tells_every_field_and_every_option() -> None:
    text = page(PAGE)
    assert all(f"`{name}`" in text for name in Report.__slots__)
    assert all(f"--{name.replace('_', '-')}" in text for name in (*AGES, "free", "backup", "tokens", "url", "json"))
    assert CheckThresholds().held_ms == CheckThresholds().behind_ms == 24 * 3600 * 1000


# --- examples, and what is printed of a frozen location


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_the_page_prints_what_it_says(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readonly_location, "SystemClock", FixedClock)
    place, example = undated(copied(tmp_path / "location")), EXAMPLES[number]
    [line] = example.text.splitlines()
    words = [str(place) if word == "DIR" else word for word in shlex.split(line)]
    assert main(words[1:]) == FOUND
    assert capsys.readouterr().out == example.prints


@pytest.mark.parametrize("form", ["txt", "json"])
def test_of_a_frozen_location_it_prints_what_it_did(
    form: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    """`pytest --rewrite` renews the files: read the difference."""
    monkeypatch.setattr(readonly_location, "SystemClock", FixedClock)
    place, file = undated(copied(tmp_path / "location")), GOLDEN / f"frozen.{form}"
    before = everything(place)
    words = [
        "check",
        "--quick",
        "--held",
        "12h",
        "--free",
        "0",
        "--dir",
        str(place),
        *(["--json"] if form == "json" else []),
    ]
    assert main(words) == FOUND
    assert everything(place) == before
    told = capsys.readouterr()
    assert told.err == ""
    if pytestconfig.getoption("--rewrite"):
        file.write_text(told.out, encoding="utf-8")
    assert told.out == file.read_text(encoding="utf-8")


def test_where_nothing_is_wrong_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "location"
    with persist.connect(f"persist://{place}") as client:
        client.create_shard("orders", SCHEMA, ["id"]).insert([{"id": 1}])
    assert main(["check", "--quick", "--free", "0", "--dir", str(place)]) == 0
    assert capsys.readouterr().out == "1 shard checked, no findings\n"
    assert main(["check", "--quick", "orders", "--free", "0", "--json", "--dir", str(place)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["pattern"], document["shards"], document["findings"]) == ("orders", 1, [])


# --- what is refused


def at(place: Path, *words: str) -> list[str]:
    return [*words, "--dir", str(place)]


def spoilt(place: Path) -> list[str]:
    (place / "consensus.db").write_bytes(b"x" * 5000)
    return at(place)


def backups_of_another(place: Path) -> list[str]:
    other, url = place.parent / "other", f"file://{place.parent}/backups"
    with persist.connect(f"persist://{other}", collect=False) as client:
        client.create_shard("orders", SCHEMA, ["id"])
    assert main(["backup", "create", "--to", url, "--dir", str(other)]) == 0
    return at(place, "--backup", url)


def no_backups(place: Path) -> list[str]:
    (place.parent / "notes").mkdir()
    (place.parent / "notes" / "a.txt").write_text("")
    return at(place, "--backup", f"file://{place.parent}/notes")


WRONG: dict[str, Callable[[Path], list[str]]] = {
    "a pattern with invalid characters": lambda p: at(p, "a b*"),
    "an unknown shard": lambda p: at(p, "nowhere"),
    "an invalid age": lambda p: at(p, "--held", "long"),
    "`--free` outside [0, 100]": lambda p: at(p, "--free", "101"),
    "an invalid `--backup-age`": lambda p: at(p, "--backup-age", "1 day"),
    "an empty `--backup`": lambda p: at(p, "--backup", ""),
    "`--backup` is no store of backups": no_backups,
    "`--backup` has backups of another location": backups_of_another,
    "`--backup` does not exist": lambda p: at(p, "--backup", f"file://{p.parent}/nowhere"),
    "`--tokens` cannot be read": lambda p: at(p, "--tokens", str(p / "nowhere.json")),
    "`--dir` without its log or blobs": lambda p: at(without(p, "consensus.db")),
    "`--url` and `--dir`": lambda p: at(p, "--url", "http://127.0.0.1:1"),
    "a consensus store that is damaged as a whole": spoilt,
    "`--quick` with `--repair`": lambda p: at(p, "orders", "--quick", "--repair", "--excise", "p1"),
    "`--yes` without `--repair`": lambda p: at(p, "orders", "--yes"),
    "`--repair` without a method": lambda p: at(p, "orders", "--repair"),
    "`--repair` through a server": lambda p: ["orders", "--repair", "--excise", "p1", "--url", "http://127.0.0.1:1"],
    "`--deep` through a server": lambda p: ["--deep", "--url", "http://127.0.0.1:1"],
    "`--rate` without `--deep`": lambda p: at(p, "--rate", "1MiB"),
    "`--rate` below 1,024": lambda p: at(p, "--deep", "--rate", "5"),
}  # fmt: skip
KINDS = {
    "an unknown shard": "unknown_shard",
    "`--backup` does not exist": "unavailable",
    "`--dir` without its log or blobs": "unavailable",
    "a consensus store that is damaged as a whole": "corruption",
}
CODES = exit_codes(PAGE)


def test_the_page_has_every_kind_of_error() -> None:
    assert {*KINDS.values(), "invalid_usage", "unauthorized", "forbidden"} <= CODES.keys()


@pytest.mark.parametrize(("row", "wrong"), WRONG.items())
def test_what_is_wrong_is_one_sentence_with_its_exit_code(
    row: str,
    wrong: Callable[[Path], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = wrong(copied(tmp_path / "location"))
    check_refused("check", arguments, (kind := KINDS.get(row, "invalid_usage"), CODES[kind]), capsys, monkeypatch)
