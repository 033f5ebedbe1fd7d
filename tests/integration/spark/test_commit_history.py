"""The commit history and Spark: writes tell of their application, and the history is a DataFrame."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.spark


def test_a_write_tells_of_its_application_and_what_it_is_told(spark: Any, client: Any, load: Any, save: Any) -> None:
    spark.sparkContext.setJobGroup("nightly", "nightly load")
    try:
        save(spark.range(3).selectExpr("concat('k', id) k", "id n"), "orders", key="k", info='{"ticket": 4711}')
        save(spark.range(1).selectExpr("concat('k', id) k", "id + 100 n"), "orders", envelope="upsert")
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
        spark.sparkContext.setLocalProperty("spark.job.description", None)
    upsert, append, created = client.shard("orders").history()
    assert (append.operation, append.rows, append.purpose) == ("insert", 3, "spark job")
    assert append.info["ticket"] == 4711
    told = append.info["spark"]
    assert told["application"] == spark.sparkContext.applicationId
    assert (told["job"], told["group"]) == ("nightly load", "nightly")
    assert told["user"]
    assert (upsert.operation, upsert.rows, upsert.retractions) == ("upsert", 2, 1)
    assert upsert.info.keys() == {"spark"}
    assert created.operation == "create"

    frame = load("orders", metadata="history")
    assert [(row.operation, row.rows, row.lower, row.upper) for row in frame.collect()] == [
        ("upsert", 2, 1, 2),
        ("insert", 3, 0, 1),
        ("create", 0, 0, 0),
    ]
    [row] = load("orders", metadata="history", historyLimit=1, maintenance="true").select("info", "seqno").collect()
    assert json.loads(row.info) == upsert.info
    assert row.seqno == upsert.seqno
