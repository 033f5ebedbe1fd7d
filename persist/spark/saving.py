"""A write job of a DataFrame to a shard, from whatever thread."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession

FORMAT = "persist"


def save(spark: SparkSession, df: DataFrame, mode: str, shard: str, options: Mapping[str, str]) -> None:
    """Run the job in that session. Raises what Spark raises of it.

    Spark 4 looks for the format of a write in the active session of the thread, and a thread that a program began has
    none: DATA_SOURCE_NOT_FOUND. PySpark makes a session active where it makes a DataFrame, and nowhere else.
    """
    if SparkSession.getActiveSession() is None:
        spark.createDataFrame([], "nothing int")
    df.write.format(FORMAT).mode(mode).options(**options).save(shard)
