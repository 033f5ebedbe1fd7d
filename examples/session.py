"""A small local Spark session for the examples."""

from __future__ import annotations

import os
import sys
from typing import Any


def local_session(name: str, cores: int = 2, tries: int = 1) -> Any:
    """Two cores of this machine; workers run this Python. A task is tried so often."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    options = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": str(cores),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.catalogImplementation": "in-memory",
    }
    builder = SparkSession.builder.master(f"local[{cores},{tries}]").appName(name)
    for option, value in options.items():
        builder = builder.config(option, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
