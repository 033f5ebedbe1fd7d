"""The examples of docs/http.md, each run as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.support.server import Server

DOCS = Path(__file__).resolve().parents[2] / "docs" / "http.md"


def examples() -> list[str]:
    return re.findall(r"```sh\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


def commands(example: str) -> list[str]:
    """The commands of one block: a line that is not a continuation begins a new one."""
    found: list[str] = []
    for line in example.splitlines():
        begins = re.match(r"(curl|printf|persist) ", line)
        if begins:
            found.append(line)
        else:
            found[-1] += "\n" + line
    return found


@pytest.fixture
def shell() -> dict[str, str]:
    """`persist` on the path, as in an activated environment."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_every_example_of_the_documentation_works(tmp_path: Path, shell: dict[str, str]) -> None:
    said: dict[str, str] = {}
    with Server(tmp_path / "data") as server:
        for example in examples():
            for command in commands(example):
                ran = subprocess.run(
                    command,
                    shell=True,
                    cwd=tmp_path,
                    env={**shell, "URL": server.url},
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
                assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
                said[command] = ran.stdout

    def answer(part: str) -> str:
        return next(out for command, out in said.items() if part in command)

    assert json.loads(answer("PUT"))["upper"] == [0]
    assert json.loads(answer("x-ndjson' $URL"))["lower"] == [0]
    assert json.loads(answer("compare-and-append"))["upper"] == [5]
    assert json.loads(answer("Idempotency-Key"))["lower"] == [5]
    assert answer("snapshot?format=csv").splitlines() == ['"id","amount","__diff"', '"a",1,1', '"b",3,1', '"c",9,1']
    assert [json.loads(line)["id"] for line in answer("as_of=0&columns=id").splitlines()] == ["a", "b"]
    assert pyarrow.parquet.read_table(tmp_path / "orders.parquet").num_rows == 3
    events = [json.loads(data) for data in re.findall(r"^data: (.*)$", answer("text/event-stream"), re.MULTILINE)]
    assert [row["id"] for event in events for row in event["rows"]] == ["b", "b", "c"]
    assert json.loads(answer("past=5"))["upper"] == [6]
    assert json.loads(answer("downgrade-since"))["shard_since"] == [3]
    assert json.loads(answer("shards?prefix"))["shards"] == ["eu/orders"]
    tokens = json.loads((tmp_path / "tokens.json").read_text())["tokens"]
    assert (tokens[0]["id"], tokens[0]["scopes"], tokens[0]["prefixes"]) == ("etl", ["write"], ["eu/"])
    assert answer("persist token").startswith("pt_etl_")
    assert "pt_etl_" not in (tmp_path / "tokens.json").read_text()
