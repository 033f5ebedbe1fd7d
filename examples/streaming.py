"""Streaming: orders flow from one shard into another, and into running totals, exactly once; kill it and run it again.

python -m examples.streaming persist:///tmp/streaming /tmp/streaming-checkpoints
"""

from __future__ import annotations

import sys
from typing import Any

CUSTOMERS = 20
ROWS_A_BATCH = 50


def feed(client: Any, batches: int) -> None:
    """Append small batches of orders."""
    import pyarrow as pa

    schema = pa.schema([("customer", pa.string()), ("number", pa.int64()), ("amount", pa.int64())])
    orders = client.create_shard("orders", schema, ["customer", "number"])
    for batch in range(batches):
        numbers = range(batch * ROWS_A_BATCH, (batch + 1) * ROWS_A_BATCH)
        orders.insert([{"customer": f"c{n % CUSTOMERS}", "number": n, "amount": n % 13} for n in numbers])


def run(spark: Any, url: str, checkpoints: str) -> None:
    """Copy what is there and has not been copied, a few batches at a time, and total it up."""
    orders = spark.readStream.format("persist").options(url=url, cursor="copy", maxRowsPerTrigger=2 * ROWS_A_BATCH)
    copy = orders.load("orders").writeStream.format("persist").options(url=url, key="customer,number")
    copy = copy.option("checkpointLocation", f"{checkpoints}/copy").trigger(availableNow=True)
    copy.start("copied").awaitTermination()

    orders = spark.readStream.format("persist").options(url=url, cursor="totals").load("orders")
    totals = orders.groupBy("customer").agg({"amount": "sum"}).withColumnRenamed("sum(amount)", "total")
    sums = totals.writeStream.format("persist").outputMode("complete").options(url=url, key="customer")
    sums = sums.option("checkpointLocation", f"{checkpoints}/totals").trigger(availableNow=True)
    sums.start("totals").awaitTermination()


if __name__ == "__main__":
    import persist
    from examples.session import local_session

    if "--no-feed" not in sys.argv:
        with persist.connect(sys.argv[1]) as client:
            feed(client, 10)
    run(local_session("streaming"), sys.argv[1], sys.argv[2])
