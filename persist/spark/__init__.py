"""PySpark: `format("persist")`, a Python data source for batch and streams.

`ShardTable` is a shard as a table, `table` reads one by Spark's own reader, and `restore` makes it again what it was.
"""

from blob import optional
from persist.core.errors import InvalidUsage

optional("pyspark", "persist.spark", "persist-shards[spark]", InvalidUsage)

from persist.spark.batch_io import restore  # noqa: E402
from persist.spark.shard_table import ShardTable, table  # noqa: E402
from persist.spark.source import PersistDataSource  # noqa: E402

__all__ = ["PersistDataSource", "ShardTable", "restore", "table"]
