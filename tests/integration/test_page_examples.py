"""The Python examples of the pages, each run as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.support import tutorial
from tests.support.pages import blocks, commands, run_python
from tests.support.server import Server
from tests.support.shells import run_shell
from tests.support.waiting import WAIT_S


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples that name a directory make it in a place of their own."""
    monkeypatch.chdir(tmp_path)


def test_the_ten_lines_of_the_readme_print_what_it_says_and_may_be_run_again() -> None:
    [example] = [
        block for block in blocks("README.md") if block.heading == "Ten lines of Python" and block.prints is not None
    ]
    assert len([line for line in example.text.splitlines() if line]) <= 12
    for _ in range(2):
        run_python("README.md", [example], {})
    assert os.listdir() == []


def test_the_first_minute_of_the_readme_needs_no_python(tmp_path: Path) -> None:
    found = [block for block in blocks("README.md") if block.heading == "The first minute"]
    assert {block.language for block in found} == {"sh"}
    assert all(command.startswith(("persist", "printf")) for block in found for command in commands(block.text))
    for block in found:
        run_shell(block, tmp_path)


def test_the_examples_of_the_shell_print_what_the_page_says(tmp_path: Path) -> None:
    for block in blocks("docs/shell.md"):
        run_shell(block, tmp_path)


def test_the_tutorial_without_its_spark_part(tmp_path: Path) -> None:
    tutorial.run(tmp_path, spark=False)


def test_the_examples_of_tables_print_what_the_page_says() -> None:
    run_python("docs/tables.md", [block for block in blocks("docs/tables.md") if block.language == "python"], {})


def test_the_examples_of_streaming_print_what_the_page_says() -> None:
    run_python("docs/streaming.md", [block for block in blocks("docs/streaming.md") if block.language == "python"], {})


# --- the examples of docs/http.md, each run as it stands there


DOCS = Path(__file__).resolve().parents[2] / "docs" / "http.md"


def examples() -> list[str]:
    return re.findall(r"```sh\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def shell() -> dict[str, str]:
    """`persist` on the path, as in an activated environment."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_every_example_of_the_documentation_works(tmp_path: Path, shell: dict[str, str]) -> None:
    said: dict[str, str] = {}
    with Server(tmp_path / "data") as server:
        for example in examples():
            for command in commands(example):
                given = {"cwd": tmp_path, "env": {**shell, "URL": server.url}, "timeout": WAIT_S}
                ran = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, **given)  # type: ignore[call-overload]
                assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
                said[command] = ran.stdout

    def answer(part: str) -> str:
        return next(out for command, out in said.items() if part in command)

    assert json.loads(answer("PUT"))["upper"] == [0]
    assert json.loads(answer("x-ndjson' $URL"))["lower"] == [0]
    assert json.loads(answer("compare-and-append"))["upper"] == [5]
    assert json.loads(answer("Idempotency-Key"))["lower"] == [5]
    assert answer("snapshot?format=csv").splitlines() == ['"id","amount","__diff"', '"a",1,1', '"b",3,1', '"c",9,1']
    assert [json.loads(line)["id"] for line in answer("limit=10").splitlines()] == ["b", "c"]
    assert answer("key=a&expand").splitlines() == ['"id","amount"', '"a",1']
    assert json.loads(answer("/count")) == {"as_of": 5, "count": 2}
    assert [json.loads(line)["id"] for line in answer("as_of=0&columns=id").splitlines()] == ["a", "b"]
    assert pyarrow.parquet.read_table(tmp_path / "orders.parquet").num_rows == 3
    events = [json.loads(data) for data in re.findall(r"^data: (.*)$", answer("text/event-stream"), re.MULTILINE)]
    assert [row["id"] for event in events for row in event["rows"]] == ["b", "b", "c"]
    assert json.loads(answer("past=5"))["upper"] == [6]
    assert json.loads(answer("downgrade-since?since=3"))["shard_since"] == [0], "its own history holds it"
    assert json.loads(answer("forget?before=3"))["since"] == [3]
    assert json.loads(answer("shards?prefix"))["shards"] == ["eu/orders", "eu/orders-test"]
    tokens = json.loads((tmp_path / "tokens.json").read_text())["tokens"]
    assert (tokens[0]["id"], tokens[0]["scopes"], tokens[0]["prefixes"]) == ("etl", ["write"], ["eu/"])
    assert answer("persist token create").startswith("pt_etl_")
    assert "pt_etl_" not in (tmp_path / "tokens.json").read_text()
