"""A program of asyncio that gives a call up and ends; no thread of the call may keep it."""

from __future__ import annotations

import asyncio
import sys

import pyarrow as pa

import persist.aio


def main(words: list[str]) -> int:
    [url] = words
    asyncio.run(_give_up(url))
    return 0


async def _give_up(url: str) -> None:
    async with persist.aio.connect(url) as client:
        shard = await client.create_shard("t", pa.schema([("id", pa.int64())]), ["id"])
        try:
            await asyncio.wait_for(shard.snapshot(100, wait_s=3600.0).to_arrow(), 0.2)
        except TimeoutError:
            sys.stderr.write("given up")
