"""Where Spark finds `format("persist")` by itself: it imports top-level packages called `pyspark_*`."""

from persist.spark import PersistDataSource as DefaultSource

__all__ = ["DefaultSource"]
