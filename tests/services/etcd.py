"""A private etcd cluster of any number of nodes on free loopback ports."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

from tests.services.process import Server, ServerError, ServerMissing, free_ports


class EtcdCluster:
    """`nodes[i]` serves clients on `ports[i]`."""

    def __init__(self, directory: Path, program: str, size: int, extra: tuple[str, ...] = ()) -> None:
        ports = free_ports(2 * size)
        self.ports, peers = ports[:size], ports[size:]
        names = [f"node{index}" for index in range(size)]
        members = ",".join(f"{name}=http://127.0.0.1:{peer}" for name, peer in zip(names, peers, strict=True))
        self.nodes: list[Server] = []
        for name, port, peer in zip(names, self.ports, peers, strict=True):
            command = [program, "--name", name, "--data-dir", str(directory / name), "--logger", "zap"]
            command += ["--listen-client-urls", f"http://127.0.0.1:{port}"]
            command += ["--advertise-client-urls", f"http://127.0.0.1:{port}"]
            command += ["--listen-peer-urls", f"http://127.0.0.1:{peer}"]
            command += ["--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"]
            command += ["--initial-cluster", members, "--initial-cluster-state", "new", "--log-level", "error"]
            command += ["--heartbeat-interval", "50", "--election-timeout", "500", *extra]
            self.nodes.append(Server(f"etcd {name}", command, directory / f"{name}.log"))

    def url(self, prefix: str = "") -> str:
        return f"etcd://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{prefix}"

    def start(self) -> None:
        # A node is healthy only with a majority, so all but the last are merely launched at first.
        for node in self.nodes:
            node.start(lambda: True)
        for index in range(len(self.nodes)):
            self.restart(index)

    def restart(self, index: int) -> None:
        """Start a node that is down (or wait for one that is coming up) until it is healthy."""
        node = self.nodes[index]
        if node.running:
            node.wait_ready(lambda: self._healthy(index))
        else:
            node.start(lambda: self._healthy(index))

    def leader(self) -> int:
        """The index of the node that leads now; ServerError if none does."""
        for index, node in enumerate(self.nodes):
            if node.running:
                status = self._post(index, "/v3/maintenance/status")
                if status.get("leader") and status["leader"] == status["header"]["member_id"]:
                    return index
        raise ServerError("no etcd node leads")

    def compact(self) -> None:
        """Forget all revisions but the latest, and give their room back, as `etcdctl compact` and `defrag` do."""
        header = self._post(0, "/v3/maintenance/status")["header"]
        self._post(0, "/v3/kv/compaction", {"revision": header["revision"], "physical": True})
        for index in range(len(self.nodes)):
            self._post(index, "/v3/maintenance/defragment")

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def _healthy(self, index: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[index]}/health", timeout=2) as reply:
                return json.load(reply)["health"] == "true"
        except (OSError, ValueError):
            return False

    def _post(self, index: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports[index]}{path}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=2) as reply:
                return json.load(reply)
        except (OSError, ValueError):
            return {}


def start_etcd(directory: Path, size: int, extra: tuple[str, ...] = ()) -> EtcdCluster:
    """Make and start a cluster; ServerMissing if etcd is not installed."""
    program = shutil.which("etcd")
    if program is None:
        raise ServerMissing("etcd is not installed (no etcd program found)")
    directory.mkdir(parents=True, exist_ok=True)
    cluster = EtcdCluster(directory, program, size, extra)
    cluster.start()
    return cluster
