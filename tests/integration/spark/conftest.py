"""One Spark session for all tests of the data source, and a place for shards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import persist

pyspark_sql = pytest.importorskip("pyspark.sql")

if shutil.which("java") is None:
    pytest.skip("needs Java", allow_module_level=True)

SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # a virtual machine that lives for seconds compiles in vain
# Java itself reads this: also where a test runs an example in a process of its own.
os.environ.setdefault("JDK_JAVA_OPTIONS", SHORT_LIVED)
FAST = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.session.timeZone": "Asia/Kolkata",  # not UTC: what is stored must not depend on it
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A local session of two cores, in which a task is tried up to four times. Nothing is registered by hand."""
    builder = pyspark_sql.SparkSession.builder.master("local[2,4]").appName("persist tests")
    for name, value in FAST.items():
        builder = builder.config(name, value)
    builder = builder.config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """An empty location in a directory of its own."""
    return f"persist://{tmp_path}/shards"


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with persist.connect(url) as client:
        yield client


@pytest.fixture
def load(spark: Any, url: str) -> Callable[..., Any]:
    """`load("orders", asOf=3)`: a DataFrame of the shard."""

    def loaded(shard: str, schema: str | None = None, **options: Any) -> Any:
        reader = spark.read.format("persist").options(url=url, **options)
        return (reader.schema(schema) if schema else reader).load(shard)

    return loaded


@pytest.fixture
def save(url: str) -> Callable[..., None]:
    """`save(frame, "orders", key="k")`: append the DataFrame to the shard."""

    def saved(frame: Any, shard: str, mode: str = "append", **options: Any) -> None:
        frame.write.format("persist").mode(mode).options(url=url, **options).save(shard)

    return saved
