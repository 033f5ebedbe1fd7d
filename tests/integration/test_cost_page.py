"""docs/cost.md: its examples are run, and each row of what is refused is provoked."""

from __future__ import annotations

import http.server
import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from persist.cli.__main__ import main
from persist.cost.prices import EXAMPLE
from persist.inspect import looking
from rpc.auth import mint
from tests.support.disaster import free_port
from tests.support.inspected import FixedClock, copied
from tests.support.pages import blocks, page, run_python
from tests.support.refused import check_refused, emptied, without
from tests.support.server import Server

PAGE = "docs/cost.md"
EXAMPLES = [block for block in blocks(PAGE) if block.language == "sh"]
COUNTS = 'persist_store_calls_total{outcome="ok",store="blob",verb="put"} '


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_the_page_prints_what_it_says(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "SystemClock", FixedClock)
    place, example = copied(tmp_path / "location"), EXAMPLES[number]
    for line in example.text.splitlines():
        words = shlex.split(line)
        assert main([str(place) if word == "DIR" else word for word in words[1:]]) == 0, line
    assert capsys.readouterr().out == example.prints


def test_the_program_of_the_page_saves_what_a_scrape_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(PAGE, [block for block in blocks(PAGE) if block.language == "python"], {})
    assert main(["cost", "--scrape", "before.json"]) == 0
    assert "counted by before.json" in capsys.readouterr().out


def test_the_page_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cost", "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert options - set(re.findall(r"--[a-z-]+", page(PAGE))) == set()


# --- what is refused


def at(place: Path, *words: str) -> list[str]:
    return ["--dir", str(place), *words]


def priced(place: Path, old: str, new: str) -> list[str]:
    """With the example of prices, changed."""
    assert old in EXAMPLE
    file = place / "prices.toml"
    file.write_text(EXAMPLE.replace(old, new))
    return at(place, "--prices", str(file))


def scraped(place: Path, *texts: str) -> list[str]:
    files = [place / f"{number}.txt" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    return [word for file in files for word in ("--scrape", str(file))]


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """A server of something else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "6")
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *said: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that asks for tokens."""
    place = tmp_path_factory.mktemp("guarded")
    entry = {"id": "one", "sha256": mint("one")[1], "scopes": ["read"], "prefixes": []}
    (place / "tokens.json").write_text(json.dumps({"tokens": [entry]}))
    with Server(place / "location", "--tokens", str(place / "tokens.json")) as server:
        yield server.url


ELSEWHERE, GUARDED = "ELSEWHERE", "GUARDED"  # in the place of the URLs of these servers
WRONG: dict[str, Callable[[Path], list[str]]] = {
    "a name that is no shard": lambda p: at(p, "nowhere"),
    "a pattern with characters that no name has": lambda p: at(p, "a b*"),
    "`--days` that is no number above 0, or more than 3,660": lambda p: at(p, "--days", "0"),
    "`--prices` that is not there": lambda p: at(p, "--prices", str(p / "none.toml")),
    "`--prices` that is no TOML": lambda p: priced(p, "[requests]", "[requests"),
    "a price that is missing": lambda p: priced(p, "list = 0.005", ""),
    "a price that is no number, or below 0": lambda p: priced(p, "get = 0.0004", "get = -0.0004"),
    "a price that is not known": lambda p: priced(p, "delete = 0.0", "delete = 0.0\nhead = 0.1"),
    "prices without a name or a currency": lambda p: priced(p, 'currency = "USD"', ""),
    "`--dir` that is not there": lambda p: at(p / "nowhere"),
    "`--dir` without anything of persist": lambda p: at(emptied(p)),
    "`--dir` whose log, or blobs, are not there": lambda p: at(without(p, "consensus.db")),
    "`--blob` without `--consensus`": lambda p: ["--blob", f"file://{p}/blob"],
    "`--url` that is none": lambda p: ["--url", "host:8787"],
    "`--url` where nobody answers": lambda p: ["--url", f"http://127.0.0.1:{free_port()}"],
    "`--url` of what is no server of persist": lambda p: ["--url", ELSEWHERE],
    "`--url` with a token that is not known": lambda p: ["--url", GUARDED],
    "`--watch` without `--url`": lambda p: at(p, "--watch", "1"),
    "`--watch` that is no number above 0, or more than a week": lambda p: ["--url", "http://a", "--watch", "-1"],
    "`--scrape` and `--url`": lambda p: [*scraped(p, f"{COUNTS}1"), "--url", "http://a"],
    "a third `--scrape`": lambda p: scraped(p, f"{COUNTS}1", f"{COUNTS}2", f"{COUNTS}3"),
    "`--scrape` that is not there": lambda p: ["--scrape", str(p / "none.txt")],
    "`--scrape` without counts of a store": lambda p: scraped(p, "persist_commits_total 1\n"),
    "a second `--scrape` that counts less than the first": lambda p: scraped(p, f"{COUNTS}2", f"{COUNTS}1"),
    "a pattern, and metrics without stores": lambda p: [*scraped(p, f"{COUNTS}1"), "orders"],
}
MORE: list[tuple[str, Callable[[Path], list[str]]]] = [
    ("`--days` that is no number above 0, or more than 3,660", lambda p: at(p, "--days", "3661")),
    ("`--days` that is no number above 0, or more than 3,660", lambda p: at(p, "--days", "a week")),
    ("`--days` that is no number above 0, or more than 3,660", lambda p: at(p, "--days", "nan")),
    ("`--prices` that is not there", lambda p: at(p, "--prices", str(p))),
    ("`--prices` that is no TOML", lambda p: priced(p, "name", "\x00")),
    ("a price that is missing", lambda p: priced(p, "[bytes] ", "[log_store] #").copy()),
    ("a price that is no number, or below 0", lambda p: priced(p, "get = 0.0004", 'get = "cheap"')),
    ("a price that is no number, or below 0", lambda p: priced(p, "get = 0.0004", "get = true")),
    ("a price that is no number, or below 0", lambda p: priced(p, "get = 0.0004", "get = nan")),
    ("a price that is not known", lambda p: priced(p, "currency =", "place = 'here'\ncurrency =")),
    ("prices without a name or a currency", lambda p: priced(p, '"S3 Standard, us-east-1"', "7")),
    ("prices without a name or a currency", lambda p: priced(p, '"USD"', '"\\u001b[31m"')),
    ("`--dir` whose log, or blobs, are not there", lambda p: at(without(p, "blob"))),
    ("`--url` that is none", lambda p: ["--url", ""]),
    ("`--watch` that is no number above 0, or more than a week", lambda p: ["--url", "http://a", "--watch", "700000"]),
    ("`--scrape` without counts of a store", lambda p: scraped(p, "{broken")),
    ("`--scrape` without counts of a store", lambda p: scraped(p, f"{COUNTS}NaN")),
    ("`--scrape` without counts of a store", lambda p: scraped(p, f"{COUNTS}many")),
]


def documented() -> dict[str, tuple[str, int]]:
    table = page(PAGE).partition("| what is asked |")[2]
    return {row: (kind, int(code)) for row, kind, code in re.findall(r"^\| (.+?) \| `(\w+)` \| (\d) \|$", table, re.M)}


def test_every_row_of_the_page_has_its_test() -> None:
    assert list(documented()) == list(WRONG)


@pytest.mark.parametrize(("row", "wrong"), [*WRONG.items(), *MORE])
def test_what_is_refused_is_one_sentence_with_its_exit_code(
    row: str,
    wrong: Callable[[Path], list[str]],
    tmp_path: Path,
    elsewhere: str,
    guarded: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = {ELSEWHERE: elsewhere, GUARDED: guarded}
    arguments = [servers.get(word, word) for word in wrong(copied(tmp_path / "location"))]
    monkeypatch.setenv("PERSIST_TOKEN", "of nobody")
    check_refused("cost", arguments, documented()[row], capsys, monkeypatch)
