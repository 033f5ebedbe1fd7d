"""PySpark: `format("persist")`, a Python data source for batch and streams.

`ShardTable` is the table API of a shard, `table` reads a shard with Spark's Parquet reader where possible, and
`restore` restores the contents of an earlier time.
"""

from blob import optional
from persist.core.errors import InvalidUsage

optional("pyspark", "persist.spark", "persist-shards[spark]", InvalidUsage)

from persist.spark.batch_io import restore  # noqa: E402
from persist.spark.shard_table import ShardTable, table  # noqa: E402
from persist.spark.source import PersistDataSource  # noqa: E402

__all__ = ["PersistDataSource", "ShardTable", "restore", "table"]
