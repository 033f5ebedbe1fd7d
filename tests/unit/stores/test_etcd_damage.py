"""What etcd says of its own damage, by a server that says nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import grpc
import pytest

from consensus import ConsensusDamaged, open_consensus


class _Damaged(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, _details: object) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(
            lambda _request, context: context.abort(grpc.StatusCode.DATA_LOSS, "etcdserver: corrupt cluster")
        )


@pytest.fixture
def url() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2), handlers=(_Damaged(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"etcd://127.0.0.1:{port}/p"
    server.stop(None).wait()


def test_a_cluster_that_finds_its_data_damaged_is_not_asked_again(url: str) -> None:
    with closing(open_consensus(url)) as store:
        for call in (lambda: store.head("k"), lambda: store.compare_and_set("k", 1, b"x")):
            with pytest.raises(ConsensusDamaged, match="backup"):
                call()
