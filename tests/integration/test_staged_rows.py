"""What was staged is committed once, and to the shard for which it was staged.

Each test names what once happened instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist import InvalidUsage
from tests.support.server import url_of

SCHEMA = pa.schema([pa.field("k", pa.string())])
SMALL, LARGE = pa.table({"k": ["staged"]}), pa.table({"k": [f"{number:030}" for number in range(10_000)]})
MERGED_AFTER = 40  # inserts after which the first rows have been merged with others


BY_BOTH = pytest.mark.parametrize("client", ["directory", "server"], indirect=True)


@pytest.fixture
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[persist.Client]:
    with url_of(getattr(request, "param", "directory"), tmp_path) as url, persist.connect(url) as opened:
        yield opened


def seen(shard: persist.Shard) -> list[str]:
    if shard.upper().element == 0:
        return []
    return sorted(shard.snapshot().to_arrow(expand=True).column("k").to_pylist())


@pytest.mark.parametrize("rows", [SMALL, LARGE], ids=["small", "large"])
def test_staged_rows_are_committed_once_also_after_they_were_merged(client: persist.Client, rows: pa.Table) -> None:
    """Small ones were inline, and once they had been merged with others they counted twice."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    with closing(shard.open_writer()) as writer:
        staged = writer.stage(rows, None)
        writer.commit_insert(staged)
        with pytest.raises(InvalidUsage, match="must not count twice"):
            writer.commit_insert(staged)
        for number in range(MERGED_AFTER):
            shard.insert([{"k": f"x{number}"}])
        for again in (writer, shard.open_writer()):
            with pytest.raises(InvalidUsage, match="must not count twice"):
                again.commit_insert(staged)
    assert seen(shard) == sorted(rows.column("k").to_pylist() + [f"x{number}" for number in range(MERGED_AFTER)])


@pytest.mark.parametrize("rows", [SMALL, LARGE], ids=["small", "large"])
def test_rows_that_were_staged_for_a_shard_go_to_no_other_one(client: persist.Client, rows: pa.Table) -> None:
    """Small ones were inline, and went to whatever shard they were committed to."""
    orders, other = (client.create_shard(name, SCHEMA, ["k"]) for name in ("orders", "other"))
    staged = orders.open_writer().stage(rows, None)
    with pytest.raises(InvalidUsage, match="does not belong to shard 'other'"):
        other.open_writer().commit_insert(staged)
    orders.open_writer().commit_insert(staged)
    assert (len(seen(orders)), seen(other)) == (len(rows), [])


@BY_BOTH
@pytest.mark.parametrize("rows", [SMALL, LARGE], ids=["small", "large"])
def test_rows_that_were_staged_for_an_earlier_life_go_to_no_later_one(client: persist.Client, rows: pa.Table) -> None:
    """Small ones were inline, and the next shard of the name took them."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    committed, never = (shard.open_writer().stage(rows, None) for _ in range(2))
    shard.open_writer().commit_insert(committed)
    shard.drop(force=True)
    following = client.create_shard("orders", SCHEMA, ["k"])
    for staged in (committed, never):
        take: Callable[[], object] = lambda s=staged: following.open_writer().commit_insert(s)  # noqa: E731
        with pytest.raises(InvalidUsage, match="does not belong to shard 'orders'"):
            take()
    assert seen(following) == []
