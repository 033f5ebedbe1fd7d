"""PySpark: `format("persist")`, a Python data source for batch and streams, and `table`, its native twin."""

from blob import optional
from persist.core.errors import InvalidUsage

optional("pyspark", "persist.spark", "persist-shards[spark]", InvalidUsage)

from persist.spark.native import table  # noqa: E402
from persist.spark.source import PersistDataSource  # noqa: E402

__all__ = ["PersistDataSource", "table"]
