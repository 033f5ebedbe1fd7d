"""One fixture per consensus provider. A new provider joins the contract suite by adding its own here."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from consensus import Consensus, open_consensus

POSTGRES = pytest.param("postgres", marks=[pytest.mark.services])
ETCD = pytest.param("etcd", marks=[pytest.mark.services])
ETCD_CLUSTER = pytest.param("etcd_cluster", marks=[pytest.mark.services, pytest.mark.proof])
SERVERS_IN_PROOF = [
    pytest.param(*POSTGRES.values, marks=[*POSTGRES.marks, pytest.mark.proof, pytest.mark.smoke]),
    pytest.param(*ETCD.values, marks=[*ETCD.marks, pytest.mark.proof, pytest.mark.smoke]),
    ETCD_CLUSTER,
]
PROVIDERS = ["memory", "sqlite", POSTGRES, ETCD, ETCD_CLUSTER]


@dataclass(frozen=True)
class Place:
    """An empty store. `open` opens it once more (closed by the fixture); `url` opens it in other processes."""

    open: Callable[[], Consensus]
    url: str | None


@pytest.fixture
def opened() -> Iterator[Callable[[str], Consensus]]:
    stores: list[Consensus] = []

    def open_another(url: str) -> Consensus:
        stores.append(open_consensus(url))
        return stores[-1]

    yield open_another
    for store in stores:
        store.close()


@pytest.fixture
def memory_consensus(opened: Callable[[str], Consensus]) -> Place:
    name = f"mem:{uuid.uuid4().hex}"
    return Place(lambda: opened(name), None)


@pytest.fixture
def sqlite_consensus(tmp_path: Path, opened: Callable[[str], Consensus]) -> Place:
    url = f"sqlite:///{tmp_path}/consensus.db"
    return Place(lambda: opened(url), url)


@pytest.fixture
def postgres_consensus(postgres_url: str, opened: Callable[[str], Consensus]) -> Place:
    return Place(lambda: opened(postgres_url), postgres_url)


@pytest.fixture
def etcd_consensus(etcd_url: str, opened: Callable[[str], Consensus]) -> Place:
    return Place(lambda: opened(etcd_url), etcd_url)


@pytest.fixture
def etcd_cluster_consensus(etcd_cluster_url: str, opened: Callable[[str], Consensus]) -> Place:
    return Place(lambda: opened(etcd_cluster_url), etcd_cluster_url)


@pytest.fixture(params=PROVIDERS)
def place(request: pytest.FixtureRequest) -> Place:
    """Every provider in turn."""
    found: Place = request.getfixturevalue(f"{request.param}_consensus")
    return found


@pytest.fixture
def consensus(place: Place) -> Consensus:
    return place.open()
