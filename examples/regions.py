"""Two data centres: a job in DC2 reads what DC1 has ingested, and writes its result at home; streams follow both.

S11 and S12 are at home in DC1, S2 in DC2. The job knows one URL, that of a server in DC2 with an index of regions: see
docs/regions.md. It reads S11 and S12 from the copy near it.

python -m examples.regions http://dc2:8787 /tmp/checkpoints
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

S11, S12, S2 = "dc1/s11", "dc1/s12", "dc2/s2"


def summarise(spark: Any, url: str) -> int:
    """Batch: read S11, as of one time, and write what came of it to S2; how many rows were read."""
    readings = spark.read.format("persist").option("url", url).load(S11)
    result = readings.selectExpr("id * 2 as id", "v")
    result.write.format("persist").option("url", url).mode("append").save(S2)
    return int(readings.count())


def follow(
    spark: Any, url: str, checkpoints: str, seen: Callable[[str, list[int]], object], names: Sequence[str] = (S12, S2)
) -> None:
    """Streams: everything that these shards have so far, once, wherever they are at home. Run it again to go on."""
    for name in names:
        stream = spark.readStream.format("persist").option("url", url).load(name)

        def batch(rows: Any, _: int, name: str = name) -> None:
            seen(name, sorted(row["id"] for row in rows.collect()))

        written = stream.writeStream.foreachBatch(batch).option("checkpointLocation", f"{checkpoints}/{name}")
        written.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    from examples.session import local_session

    session = local_session("regions")
    print(summarise(session, sys.argv[1]), "rows were read")
    follow(session, sys.argv[1], sys.argv[2], lambda name, ids: print(name, ids))
