"""Registers `format("persist")`: Spark imports every top-level package whose name starts with `pyspark_`."""

from persist.spark import PersistDataSource as DefaultSource

__all__ = ["DefaultSource"]
