"""State: what each account holds by its entries, corrections included, kept by Spark and written exactly once.

python -m examples.running_balances persist:///tmp/balances /tmp/balances-checkpoints

Entries are corrected by rows that leave and rows that come. `readChangeFeed` tells both, so the state of an account is
a sum over changes: nothing is computed anew. Spark keeps the state with its checkpoint. Run it again, also after a
kill: it goes on where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

ACCOUNTS = 5
ENTRIES = 20
BALANCES = "account string, entries bigint, balance bigint"
STATE = "entries bigint, balance bigint"


def feed(client: Any) -> None:
    """Entries at one time, and corrections of some at the next."""
    import pyarrow as pa

    schema = pa.schema([("account", pa.string()), ("entry", pa.int64()), ("amount", pa.int64())])
    entries = client.create_shard("entries", schema, ["account", "entry"])
    first = entries.upper().element * ENTRIES
    rows = [{"account": f"a{n % ACCOUNTS}", "entry": n, "amount": n % 7} for n in range(first, first + ENTRIES)]
    entries.insert(rows)
    entries.upsert([{**row, "amount": row["amount"] + 100} for row in rows[:ACCOUNTS]])


def balances(account: tuple[str], batches: Iterator[Any], state: Any) -> Iterator[Any]:
    """What one account comes to with some more changes. Each change counts as often as `__diff` says."""
    import pandas as pd

    entries, balance = state.get if state.exists else (0, 0)
    for batch in batches:
        entries += int(batch["__diff"].sum())
        balance += int((batch["amount"] * batch["__diff"]).sum())
    state.update((entries, balance))
    yield pd.DataFrame({"account": [account[0]], "entries": [entries], "balance": [balance]})


def run(spark: Any, url: str, checkpoints: str) -> None:
    """Everything that is there and has not been counted, at most thirty changes at a time."""
    changes = spark.readStream.format("persist").options(url=url, readChangeFeed="true", cursor="balances")
    changes = changes.options(maxRowsPerTrigger=30).load("entries")
    kept = changes.groupBy("account").applyInPandasWithState(balances, BALANCES, STATE, "append", "NoTimeout")
    sink = kept.writeStream.format("persist").outputMode("append")
    sink = sink.options(url=url, key="account", envelope="upsert")
    sink = sink.option("checkpointLocation", f"{checkpoints}/balances").trigger(availableNow=True)
    sink.start("balances").awaitTermination()


if __name__ == "__main__":
    import persist
    from examples.session import local_session

    with persist.connect(sys.argv[1]) as client:
        feed(client)
    spark = local_session("running balances")
    run(spark, sys.argv[1], sys.argv[2])
    spark.read.format("persist").options(url=sys.argv[1]).load("balances").orderBy("account").show()
