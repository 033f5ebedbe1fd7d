"""Which shard and which verb a path means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.routes.table import VERBS, resolve, split

SEGMENT = st.text("abcXYZ019._-", min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/shards/orders", ("orders", "")),
        ("/v1/shards/orders/insert", ("orders", "insert")),
        ("/v1/shards/eu/orders", ("eu/orders", "")),
        ("/v1/shards/eu/orders/insert", ("eu/orders", "insert")),
        ("/v1/shards/eu%2Forders/insert", ("eu/orders", "insert")),
        ("/v1/shards/eu/listen", ("eu", "listen")),
        ("/v1/shards/eu%2flisten", ("eu/listen", "")),
        ("/v1/shards/eu/listen/listen", ("eu/listen", "listen")),
        ("/v1/shards/listen", ("listen", "")),
        ("/v1/shards", None),
        ("/v1/shards/", None),
        ("/v1/location", None),
    ],
)
def test_a_path_means_one_shard_and_one_verb(path: str, meant: tuple[str, str] | None) -> None:
    assert split(path) == meant


@given(region=st.none() | SEGMENT, name=SEGMENT, verb=st.sampled_from(["", *sorted(VERBS)]))
def test_an_encoded_slash_always_belongs_to_the_name(region: str | None, name: str, verb: str) -> None:
    full = name if region is None else f"{region}/{name}"
    path = f"/v1/shards/{full.replace('/', '%2F')}" + (f"/{verb}" if verb else "")
    assert split(path) == (full, verb)


def test_the_router_finds_one_segment_whatever_the_name() -> None:
    scope = {"path": "/v1/shards/eu/orders/insert", "raw_path": b"/v1/shards/eu%2Forders/insert?x=1"}
    assert resolve(scope) == ("eu/orders", "insert")
    assert scope["path"].count("/") == 4
    assert scope["persist.shard"] == "eu/orders"
