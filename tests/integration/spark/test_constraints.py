"""Constraints in Spark: rows are looked at in the tasks that stage them."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.spark

SCHEMA = "id bigint, n bigint"


def test_an_upsert_and_an_append_obey_checks_and_unique_keys(spark: Any, client: Any, load: Any, save: Any) -> None:
    options = {"key": "id", "unique": "true", "checks": json.dumps({"positive": "n > 0"})}
    save(spark.createDataFrame([(1, 1), (2, 2)], SCHEMA), "orders", **options)
    details = client.shard("orders").schema.details
    assert (details.unique, [check.name for check in details.checks]) == (True, ["positive"])
    with pytest.raises(Exception, match=r"constraint 'positive' refuses 1 row for which 'n > 0' is false.*Keys: 3"):
        save(spark.createDataFrame([(3, 0)], SCHEMA), "orders")
    save(spark.createDataFrame([(1, 5), (3, 3)], SCHEMA), "orders", envelope="upsert")
    assert sorted(load("orders").collect()) == [(1, 5), (2, 2), (3, 3)]
    with pytest.raises(Exception, match=r"key .* comes more than once"):
        save(spark.createDataFrame([(4, 4), (4, 5)], SCHEMA), "orders", envelope="upsert")
    save(spark.createDataFrame([(1, 6)], SCHEMA), "orders")  # an append does not look keys up
    [broken] = client.shard("orders").broken_constraints()
    assert (broken.constraint, broken.keys) == ("unique", [(1,)])
    [detail] = load("orders", metadata="detail").collect()
    assert (detail.unique, detail.not_null, detail.checks) == (True, [], {"positive": "n > 0"})
