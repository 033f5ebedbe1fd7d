"""PySpark: `format("persist")`, a Python data source for batch reads and writes. The map is in the README."""

from persist.spark.source import PersistDataSource

__all__ = ["PersistDataSource"]
