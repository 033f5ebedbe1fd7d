"""A Python service with time travel: accounts over HTTP, transfers exactly once, balances as of any time.

uvicorn --factory examples.service:create_app        # PERSIST_URL names the shards, by default persist:///tmp/bank
curl -X POST 'localhost:8000/transfers?giver=ann&taker=bob&amount=5' -H 'Idempotency-Key: 7f3a'
curl 'localhost:8000/accounts?as_of=0'
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import pyarrow as pa
from fastapi import FastAPI, Header, HTTPException, Query

import persist
from persist import source, target

ACCOUNTS = pa.schema([("name", pa.string()), pa.field("balance", pa.int64(), nullable=False)])
OPENING = [{"name": "ann", "balance": 100}, {"name": "bob", "balance": 100}]
Amount = Annotated[int, Query(gt=0)]


def transfer(accounts: persist.Shard, giver: str, taker: str, amount: int, key: str) -> int:
    """Move an amount in one commit, whatever is written beside it. Returns the time; a retry with `key` the same one.

    Raises InvalidUsage: no such account (its balance would be null), or not enough money (the check of the shard).
    """
    moves = [{"name": giver, "delta": -amount}, {"name": taker, "delta": amount}]
    merge = accounts.merge(moves).when_matched_update({"balance": target("balance") + source("delta")})
    merge = merge.when_not_matched_insert({"name": source("name"), "balance": None})
    return merge.execute(token=key).time or 0


def create_app(url: str | None = None) -> FastAPI:
    """The application over the shards at `url`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with persist.connect(url or os.environ.get("PERSIST_URL", "persist:///tmp/bank")) as client:
            shard = client.create_shard("accounts", ACCOUNTS, ["name"], unique=True, checks={"funds": "balance >= 0"})
            shard.merge(OPENING).when_not_matched_insert().execute()  # those that are missing
            app.state.accounts = shard
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/accounts")
    def show(as_of: int | None = None) -> dict[str, int]:
        try:
            rows = app.state.accounts.snapshot(as_of, wait_s=0).to_arrow()
        except (persist.NotReadable, persist.Unavailable) as error:
            raise HTTPException(404, str(error)) from error
        return dict(zip(rows["name"].to_pylist(), rows["balance"].to_pylist(), strict=True))

    @app.post("/transfers")
    def move(giver: str, taker: str, amount: Amount, idempotency_key: Annotated[str, Header()]) -> dict[str, int]:
        try:
            return {"time": transfer(app.state.accounts, giver, taker, amount, idempotency_key)}
        except persist.InvalidUsage as error:
            raise HTTPException(409, str(error)) from error

    return app
