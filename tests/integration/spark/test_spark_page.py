"""The examples of docs/spark.md, one after the other, over shards of a directory; and the tutorial."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from tests.support import tutorial
from tests.support.pages import blocks, run_python
from tests.support.patience import patiently

pytestmark = pytest.mark.spark

PAGE = "docs/spark.md"
COLUMNS = pa.schema([("customer", pa.string()), ("amount", pa.int64()), ("paid", pa.date32())])
TIMES = 18  # one example reads as of 17


@pytest.mark.proof
def test_the_examples_run(spark: Any, client: Any, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    orders = client.create_shard("orders", COLUMNS, key=["customer"])
    for time in range(TIMES):
        orders.insert([{"customer": f"a{time}", "amount": time, "paid": None}])
    more = orders.schema.arrow.empty_table()
    names: dict[str, Any] = {"spark": spark, "client": client, "url": url, "persist": persist, "table": more}
    for block in blocks(PAGE):
        text = block.text.replace("http://host:8787", url).replace("persist:///data", url)
        text = text.replace('"checkpoints/', f'"{tmp_path}/checkpoints/')  # Spark has a working directory of its own
        if block.language == "python":
            example = replace(block, text=text)
            if "foreachBatch" in text:
                by_hand = example  # once the copy by the sink is there
                continue
            run_python(PAGE, [example], names)
            if "writeStream" in text:
                stream = example
            names["table"] = more  # one example imports a function of this name
        elif block.language == "sql":
            for statement in text.strip().rstrip(";").split(";\n"):
                spark.sql(statement).collect()

    def streamed() -> None:
        if not names["query"].isActive:
            run_python(PAGE, [stream], names)
        names["query"].processAllAvailable()

    patiently(streamed)
    assert names["seconds_behind"](names["query"]) == 0.0
    names["query"].stop()
    assert client.shard("copy").snapshot().to_arrow().num_rows == TIMES
    assert client.shard("copied").snapshot().to_arrow().num_rows >= TIMES
    assert client.shard("orders").snapshot().to_arrow().num_rows == TIMES + 2
    for _ in range(2):  # the second time there is nothing more
        patiently(lambda: run_python(PAGE, [by_hand], names))
        assert client.shard("copy").snapshot().to_arrow().num_rows == TIMES + 2


@pytest.mark.smoke
@pytest.mark.proof
def test_the_tutorial_prints_what_it_says(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tutorial.run(tmp_path, spark=True)
