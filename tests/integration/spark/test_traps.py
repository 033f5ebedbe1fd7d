"""What is treacherous in PySpark's Python data sources: each trap is pinned, so that a change of Spark's is noticed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.datasource import DataSourceReader

from persist.spark import ShardTable
from persist.spark.batch_io import BatchWriter, SnapshotReader
from persist.spark.options import Options, Target, WriteOptions

pytestmark = [pytest.mark.spark, pytest.mark.proof]

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


def ten(client: Any, name: str = "orders") -> Any:
    shard = client.create_shard(name, SCHEMA, ["k"])
    shard.insert([{"k": f"k{i:02d}", "n": i} for i in range(10)])
    return shard


def test_trap_1_a_filtered_use_of_a_dataframe_leaves_its_other_uses_whole(client: Any, load: Any) -> None:
    ten(client)
    df = load("orders")
    assert df.filter("k = 'k01'").count() == 1
    assert df.count() == 10
    both = df.filter("k = 'k01'").union(df.filter("k = 'k02'"))
    assert sorted(row.k for row in both.collect()) == ["k01", "k02"]
    assert SnapshotReader.pushFilters is DataSourceReader.pushFilters


def test_trap_4_create_table_loses_its_options_and_is_refused_in_a_sentence(spark: Any, client: Any, url: str) -> None:
    ten(client)
    with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE lost USING persist OPTIONS (url '{url}', path 'orders')")


def test_trap_4_views_and_with_options_keep_them(spark: Any, client: Any, url: str) -> None:
    ten(client)
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW kept USING persist OPTIONS (url '{url}', path 'orders')")
    assert spark.sql("SELECT sum(n) FROM kept").collect()[0][0] == 45
    spark.sql("INSERT INTO kept VALUES ('sql', 55)")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW fresh USING persist OPTIONS (url '{url}', path 'orders')")
    assert spark.sql("SELECT sum(n) FROM fresh").collect()[0][0] == 100


def test_trap_5_abort_never_undoes_a_commit(spark: Any, client: Any, url: str) -> None:
    shard = ten(client)
    target = Target.of(Options({"url": url, "path": "orders"}))
    frame = spark.createDataFrame([("a", 1)], "k string, n bigint")
    writer = BatchWriter(target, WriteOptions.of(Options({})), frame.schema)
    message = writer.write(iter([pa.RecordBatch.from_pydict({"k": ["a"], "n": [1]}, schema=SCHEMA)]))
    writer.commit([message])
    writer.abort([message, None])
    assert shard.snapshot().to_arrow(expand=True).num_rows == 11
    writer.commit([message])  # and a commit that is tried again is the same commit
    assert shard.snapshot().to_arrow(expand=True).num_rows == 11


def test_trap_6_workers_run_the_python_of_the_driver(spark: Any) -> None:
    def executable(_: Any) -> str:
        import sys

        return sys.executable

    assert spark.sparkContext.parallelize([0], 1).map(executable).collect() == [sys.executable]


@pytest.mark.parametrize("mode", ["error", "ignore"])
def test_trap_7_the_default_save_mode_is_refused(spark: Any, client: Any, save: Any, mode: str) -> None:
    ten(client)
    frame = spark.createDataFrame([("a", 1)], "k string, n bigint")
    with pytest.raises(AnalysisException, match="mode"):
        save(frame, "orders", mode=mode)


def test_trap_8_the_package_that_spark_discovers_imports_without_a_word() -> None:
    code = "import pyspark_persist; print(pyspark_persist.DefaultSource.name())"
    ignored = ["-W", "error", "-W", "ignore::FutureWarning:pyspark"]
    done = subprocess.run([sys.executable, *ignored, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("persist\n", "", 0)


def test_trap_a_thread_of_the_program_has_no_session_to_write_in(spark: Any, client: Any, save: Any, url: str) -> None:
    """So `ShardTable` makes its own the active one, as the page tells users to."""
    frame = spark.createDataFrame([("thread", 1)], "k string, n bigint")
    shard = client.create_shard("orders", SCHEMA, ["k"])

    def in_a_thread(work: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    with pytest.raises(Py4JJavaError, match="DATA_SOURCE_NOT_FOUND"):
        in_a_thread(lambda: save(frame, "orders"))
    in_a_thread(lambda: [spark.createDataFrame([], "nothing int"), save(frame, "orders")])
    assert in_a_thread(lambda: ShardTable.for_name(spark, "orders", url=url).append(frame).time) == 1
    in_a_thread(lambda: ShardTable.for_name(spark, "orders", url=url).restore(0))
    assert shard.snapshot().to_arrow(expand=True).num_rows == 1
