"""PySpark: `format("persist")`, a Python data source for batch and streams, and `table`, its native twin."""

from persist.spark.native import table
from persist.spark.source import PersistDataSource

__all__ = ["PersistDataSource", "table"]
