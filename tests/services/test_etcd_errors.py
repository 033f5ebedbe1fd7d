"""Every failure of this store in docs/troubleshooting.md, provoked on real clusters."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import grpc
import pytest

from consensus import (
    Consensus,
    ConsensusError,
    ConsensusIndeterminate,
    ConsensusMisconfigured,
    ConsensusNotWritable,
    ConsensusUnavailable,
    ConsensusUsage,
    open_consensus,
)
from consensus.etcd import EtcdConsensus
from consensus.etcd_protobuf import load_etcd3
from tests.services.etcd import EtcdCluster, start_etcd
from tests.services.fault_proxy import FaultProxy
from tests.services.load import Load
from tests.services.process import free_ports, wait_until

pytestmark = pytest.mark.services


@pytest.fixture
def direct(etcd_server: EtcdCluster, request: pytest.FixtureRequest) -> Iterator[Consensus]:
    store = open_consensus(etcd_server.url(f"errors/{request.node.name}-{free_ports(1)[0]}"))
    assert store.compare_and_set("k", 1, b"first")
    yield store
    store.close()


@pytest.fixture
def proxy(etcd_server: EtcdCluster, fault_proxy: Callable[[int], FaultProxy]) -> FaultProxy:
    return fault_proxy(etcd_server.ports[0])


@pytest.fixture
def behind(direct: Consensus, proxy: FaultProxy) -> Iterator[Consensus]:
    """The same prefix through the proxy, impatient, with a connection open."""
    prefix = direct.url.partition("://")[2].partition("/")[2]
    store = EtcdConsensus([f"127.0.0.1:{proxy.port}"], prefix, timeout_s=2.0)
    assert store.head("k") is not None
    yield store
    proxy.mode("pass")
    store.close()


@pytest.fixture
def small_etcd(services_dir: Path, etcd_server: EtcdCluster) -> Iterator[EtcdCluster]:
    """An etcd with tight limits, of this test alone. (`etcd_server` skips where etcd is missing.)"""
    limits = ("--quota-backend-bytes", str(4 * 2**20), "--max-request-bytes", str(256 * 1024))
    cluster = start_etcd(services_dir / f"etcd-small-{free_ports(1)[0]}", 1, limits)
    yield cluster
    cluster.stop()


def test_connection_refused() -> None:
    with closing(open_consensus(f"etcd://127.0.0.1:{free_ports(1)[0]}/x")) as store:
        for call in (store.check, lambda: store.head("k"), lambda: store.compare_and_set("k", 1, b"x")):
            with pytest.raises(ConsensusUnavailable, match="cannot be reached"):
                call()


def test_wrong_host() -> None:
    with closing(open_consensus("etcd://no-such-host.invalid:2379/x?timeout=2")) as store:
        with pytest.raises(ConsensusUnavailable, match="no-such-host"):
            store.check()
        with pytest.raises(ConsensusUnavailable):
            store.compare_and_set("k", 1, b"x")


@pytest.mark.parametrize("url", [
    "etcd:///prefix", "etcd://host:port/x", "etcd://a,,b/x", "etcd://a/x?speed=1", "etcd://a/x?timeout=soon",
    "etcd://a/x y",
])  # fmt: skip
def test_a_url_that_cannot_be_meant(url: str) -> None:
    with pytest.raises(ConsensusMisconfigured, match="etcd:"):
        open_consensus(url)


def test_tls_files_that_are_not_there(tmp_path: Path) -> None:
    with (
        closing(open_consensus(f"etcd://127.0.0.1:2379/x?ca={tmp_path}/no-ca.pem")) as store,
        pytest.raises(ConsensusMisconfigured, match="TLS"),
    ):
        store.check()


def test_a_dead_endpoint_is_passed_over(etcd_server: EtcdCluster) -> None:
    dead, alive = free_ports(1)[0], etcd_server.ports[0]
    with closing(open_consensus(f"etcd://127.0.0.1:{dead},127.0.0.1:{alive}/passed-over-{dead}")) as store:
        assert store.compare_and_set("k", 1, b"nothing was sent to the dead one, so this is safe")
        assert store.head("k") is not None


def test_a_connection_may_take_half_of_the_timeout(etcd_server: EtcdCluster, proxy: FaultProxy) -> None:
    proxy.delay_s = 1.5
    proxy.mode("delay")
    with closing(EtcdConsensus([f"127.0.0.1:{proxy.port}"], f"slow-{proxy.port}", timeout_s=240.0)) as store:
        assert store.compare_and_set("k", 1, b"over a connection that took long")


def test_an_endpoint_that_accepts_and_says_nothing_is_passed_over(etcd_server: EtcdCluster, proxy: FaultProxy) -> None:
    proxy.mode("hang")
    addresses = [f"127.0.0.1:{port}" for port in (proxy.port, etcd_server.ports[0])]
    with closing(EtcdConsensus(addresses, f"silent-{proxy.port}", timeout_s=2.0)) as store:
        assert store.compare_and_set("k", 1, b"nothing was sent to the silent one, so this is safe")


def test_a_reply_that_never_comes_after_the_commit(behind: Consensus, direct: Consensus, proxy: FaultProxy) -> None:
    proxy.mode("swallow")
    with pytest.raises(ConsensusIndeterminate, match="DEADLINE"):
        behind.compare_and_set("k", 2, b"landed")
    proxy.mode("pass")
    head = direct.head("k")
    assert head is not None
    assert (head.seqno, head.data) == (2, b"landed")


def test_a_request_that_never_arrives(behind: Consensus, direct: Consensus, proxy: FaultProxy) -> None:
    proxy.mode("hang")
    with pytest.raises(ConsensusIndeterminate):
        behind.compare_and_set("k", 2, b"lost on the way")
    with pytest.raises(ConsensusUnavailable):
        behind.head("k")
    proxy.cut()
    proxy.mode("pass")
    assert direct.compare_and_set("k", 2, b"not taken")
    wait_until(lambda: _head(behind) == 2, "it answers again")


def test_a_connection_reset_in_the_middle(behind: Consensus, direct: Consensus, proxy: FaultProxy) -> None:
    proxy.mode("reset")
    with pytest.raises(ConsensusError):
        behind.compare_and_set("k", 2, b"lost on the way")
    proxy.mode("pass")
    assert direct.compare_and_set("k", 2, b"not taken")
    wait_until(lambda: _head(behind) == 2, "it answers again")


def _is_done(call: Callable[[object], object], request: object) -> bool:
    """Whether a change of users is made. On a slow machine etcd may make one that it calls timed out."""
    try:
        call(request)
    except grpc.RpcError as error:
        return "already" in error.details()
    return True


def _head(store: Consensus) -> int:
    with suppress(ConsensusUnavailable):
        head = store.head("k")
        return head.seqno if head else 0
    return -1


def test_a_password_that_nobody_asked_for(etcd_server: EtcdCluster) -> None:
    url = etcd_server.url("x").replace("etcd://", "etcd://user:secret@")
    with closing(open_consensus(url)) as store, pytest.raises(ConsensusMisconfigured) as refused:
        store.check()
    assert "secret" not in str(refused.value)


def test_wrong_password_and_missing_rights(small_etcd: EtcdCluster) -> None:
    admin = load_etcd3().client(port=small_etcd.ports[0], timeout=5)
    messages, auth = load_etcd3().etcdrpc, load_etcd3().etcdrpc.AuthStub(admin.channel)
    for call, request in (
        (auth.UserAdd, messages.AuthUserAddRequest(name="root", password="rootpw")),
        (auth.UserGrantRole, messages.AuthUserGrantRoleRequest(user="root", role="root")),
        (auth.UserAdd, messages.AuthUserAddRequest(name="guest", password="guestpw")),
        (auth.AuthEnable, messages.AuthEnableRequest()),
    ):
        wait_until(partial(_is_done, call, request), "etcd takes a change of its users")
    admin.close()

    def url(login: str) -> str:
        return small_etcd.url("secured").replace("etcd://", f"etcd://{login}")

    with closing(open_consensus(url("root:rootpw@"))) as store:
        store.check()
        assert store.compare_and_set("k", 1, b"x")
        heard: list[str] = []
        unsubscribe = store.subscribe(heard.append)
        assert unsubscribe is not None
        wait_until(lambda: store.compare_and_set("k", _head(store) + 1, b"x") and bool(heard), "the watch is logged in")
        unsubscribe()
    for login in ("root:wrong@", "guest:guestpw@", ""):
        with (
            closing(open_consensus(url(login))) as store,
            pytest.raises(ConsensusMisconfigured, match=r"user|password"),
        ):
            store.check()


def test_a_value_larger_than_this_server_takes(small_etcd: EtcdCluster) -> None:
    with closing(open_consensus(small_etcd.url("large"))) as store:
        with pytest.raises(ConsensusUsage, match="max-request-bytes"):
            store.compare_and_set("k", 1, b"x" * 2**19)
        assert store.head("k") is None


def test_the_quota_is_used_up(small_etcd: EtcdCluster) -> None:
    with closing(open_consensus(small_etcd.url("full"))) as store:
        with pytest.raises(ConsensusNotWritable, match="full"):
            _fill(store)
        last = _head(store)
        assert last > 0
        assert store.truncate("k", last) == last - 1, "deleting is how one gets out of it"


def _fill(store: Consensus) -> None:
    for seqno in range(1, 200):
        assert store.compare_and_set("k", seqno, b"x" * 200_000)


@pytest.fixture
def three(etcd_cluster: EtcdCluster, etcd_cluster_url: str) -> Iterator[Consensus]:
    store = open_consensus(f"{etcd_cluster_url}?timeout=1.5")
    store.check()
    yield store
    store.close()


def test_the_leader_killed_under_load_loses_nothing(
    three: Consensus, etcd_cluster: EtcdCluster, etcd_cluster_url: str
) -> None:
    load = Load(three)
    try:
        load.wait_for(40)
        leader = etcd_cluster.leader()
        etcd_cluster.nodes[leader].kill()
        load.wait_for(40)
        assert etcd_cluster.leader() != leader
        etcd_cluster.restart(leader)
        load.wait_for(40)
    finally:
        load.stop()
    with closing(open_consensus(etcd_cluster_url)) as reader:
        load.verify(reader)


def test_a_frozen_leader_is_left_after_one_timeout(
    three: Consensus, etcd_cluster: EtcdCluster, etcd_cluster_url: str
) -> None:
    load = Load(three)
    leader = etcd_cluster.leader()
    try:
        load.wait_for(20)
        etcd_cluster.nodes[leader].signal(signal.SIGSTOP)
        load.wait_for(40)
    finally:
        etcd_cluster.nodes[leader].signal(signal.SIGCONT)
        load.stop()
    with closing(open_consensus(etcd_cluster_url)) as reader:
        load.verify(reader)


def test_without_a_majority_nothing_is_answered_and_nothing_is_lost(
    three: Consensus, etcd_cluster: EtcdCluster
) -> None:
    assert three.compare_and_set("k", 1, b"before")
    dead = [index for index in range(3) if index != etcd_cluster.leader()]
    for index in dead:
        etcd_cluster.nodes[index].kill()
    with pytest.raises(ConsensusUnavailable):
        three.head("k")
    with pytest.raises(ConsensusError):
        three.compare_and_set("k", 2, b"perhaps")
    for index in dead:
        etcd_cluster.nodes[index].start(lambda: True)
    for index in dead:
        etcd_cluster.restart(index)
    wait_until(lambda: _head(three) in (1, 2), "the majority answers again")
    assert three.scan("k", 1, 1)[0].data == b"before"


def test_a_push_channel_outlives_its_server(three: Consensus, etcd_cluster: EtcdCluster) -> None:
    heard: list[str] = []
    unsubscribe = three.subscribe(heard.append)
    assert unsubscribe is not None
    other = open_consensus(f"{three.url}?timeout=1.5")
    for index in range(3):
        etcd_cluster.nodes[index].kill()
        heard.clear()
        wait_until(lambda: _append(other) and "k" in heard, "the watch has moved on")
        etcd_cluster.restart(index)
    unsubscribe()
    other.close()


def _append(store: Consensus) -> bool:
    with suppress(ConsensusUnavailable, ConsensusIndeterminate):
        return store.compare_and_set("k", max(0, _head(store)) + 1, b"x")
    return True


def test_etcd3_loads_beside_the_installed_protobuf_and_only_once() -> None:
    assert load_etcd3() is load_etcd3()
    assert load_etcd3().etcdrpc.RangeRequest(key=b"k").SerializeToString() == b"\n\x01k"
