"""PySpark: `format("persist")`, a Python data source for batch and streams.

`table` is its native twin, `restore` makes a shard again what it was, as a Spark job.
"""

from blob import optional
from persist.core.errors import InvalidUsage

optional("pyspark", "persist.spark", "persist-shards[spark]", InvalidUsage)

from persist.spark.native import table  # noqa: E402
from persist.spark.past import restore  # noqa: E402
from persist.spark.source import PersistDataSource  # noqa: E402

__all__ = ["PersistDataSource", "restore", "table"]
