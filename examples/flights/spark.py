"""The demo's Spark sessions: local, one task a core."""

from __future__ import annotations

import sys
from typing import Any

TASK_TRIES = 4
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.session.timeZone": "UTC",
    "spark.pyspark.python": sys.executable,
    "spark.pyspark.driver.python": sys.executable,
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",  # few cores, a small heap
}


def session(name: str, cores: int, scratch: str) -> Any:
    """A session; `format("persist")` is found by itself."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{cores},{TASK_TRIES}]").appName(name)
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    builder = builder.config("spark.sql.shuffle.partitions", str(cores)).config("spark.local.dir", scratch)
    spark = builder.config("spark.sql.warehouse.dir", f"{scratch}/warehouse").getOrCreate()
    spark.sparkContext.setLogLevel("WARN")
    return spark


__all__ = ["session"]
