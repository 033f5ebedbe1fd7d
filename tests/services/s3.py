"""A private S3 server on a free loopback port: Ceph's gateway where it is installed, else moto's emulator."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import sys
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from tests.services.process import Server, ServerError, ServerMissing, free_ports, run

ACCESS_KEY = "testaccess"
SECRET_KEY = "testsecret"
CEPH_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph-authtool", "monmaptool")

# One monitor, one object store in memory, one gateway. `paxos propose interval` halves the start, and without
# `tcp_nodelay` every get would wait 40 ms for the peer's acknowledgement.
CEPH_CONF = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}/0]
mon initial members = a
public addr = 127.0.0.1
ms bind ipv6 = false
ms bind msgr1 = false
auth allow insecure global id reclaim = true
keyring = {root}/keyring
run dir = {root}
crash dir = {root}
admin socket = {root}/$name.asok
log file = {root}/$name.log
mon data = {root}/mon
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail warn = 1
mon data avail crit = 1
paxos propose interval = 0.01
paxos min wait = 0.01
osd data = {root}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
rgw data = {root}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw override bucket index max shards = 1
rgw dynamic resharding = false
debug ms = 0
debug mon = 0
debug osd = 0
debug rgw = 1
"""


class S3Server:
    """Servers in the order of their start; the last one speaks S3 on `port`."""

    def __init__(self, kind: str, port: int, servers: list[Server]) -> None:
        self.kind = kind
        self.port = port
        self.gateway = servers[-1]
        self._servers = servers

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def restart_gateway(self) -> None:
        """Start the gateway again after it was killed. Ceph's keeps the blobs, moto's does not."""
        self.gateway.start(lambda: http_answers(self.port))

    def stop(self) -> None:
        for server in reversed(self._servers):
            server.stop()


def http_answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def start_s3(directory: Path) -> S3Server:
    """Start whichever server this machine has; ServerMissing if it has none."""
    directory.mkdir(parents=True, exist_ok=True)
    if all(shutil.which(program) for program in CEPH_PROGRAMS):
        return start_ceph(directory)
    if importlib.util.find_spec("moto") is not None:
        return start_moto(directory)
    raise ServerMissing("no S3 server is installed (neither radosgw nor the Python package moto[server])")


def start_moto(directory: Path) -> S3Server:
    port = free_ports(1)[0]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = Server("moto", command, directory / "moto.log", end_signal=signal.SIGTERM)
    server.start(lambda: http_answers(port))
    return S3Server("moto", port, [server])


def start_ceph(directory: Path) -> S3Server:
    port, mon_port = free_ports(2)
    conf = directory / "ceph.conf"
    fsid = str(uuid.uuid4())
    conf.write_text(CEPH_CONF.format(fsid=fsid, root=directory, port=port, mon_port=mon_port))
    for name in ("mon", "osd", "rgw"):
        (directory / name).mkdir()
    _make_keys(directory / "keyring")
    monmap = str(directory / "monmap")
    address = f"[v2:127.0.0.1:{mon_port}]"
    run(["monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, "--enable-all-features", monmap])
    base = ["-c", str(conf)]
    run(["ceph-mon", *base, "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", str(directory / "keyring")])
    mon = Server("ceph-mon", ["ceph-mon", "-f", *base, "-i", "a"], directory / "mon.out")
    osd = Server("ceph-osd", ["ceph-osd", "-f", *base, "-i", "0"], directory / "osd.out")
    rgw = Server("radosgw", ["radosgw", "-f", *base, "-n", "client.rgw"], directory / "rgw.out")
    server = S3Server("radosgw", port, [mon, osd, rgw])
    try:
        mon.start(lambda: True)
        osd_id = str(uuid.uuid4())
        run(["ceph", *base, "--connect-timeout", "30", "osd", "new", osd_id])
        run(["ceph-osd", *base, "-i", "0", "--mkfs", "--osd-uuid", osd_id])
        osd.start(lambda: _osd_is_up(base))
        user = ["user", "create", "--uid", "test", "--display-name", "test"]
        run(["radosgw-admin", *base, *user, "--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY])
        rgw.start(lambda: http_answers(port))
    except ServerError:
        server.stop()
        raise
    return server


def _make_keys(keyring: Path) -> None:
    rights = {
        "mon.": ["--cap", "mon", "allow *"],
        "client.admin": ["--cap", "mon", "allow *", "--cap", "osd", "allow *"],
        "osd.0": ["--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"],
        "client.rgw": ["--cap", "mon", "allow rw", "--cap", "osd", "allow rwx"],
    }
    for index, (name, caps) in enumerate(rights.items()):
        create = ["--create-keyring"] if index == 0 else []
        run(["ceph-authtool", str(keyring), *create, "--gen-key", "-n", name, *caps])


def _osd_is_up(base: list[str]) -> bool:
    try:
        answer = run(["ceph", *base, "--connect-timeout", "5", "--format", "json", "osd", "stat"])
        return bool(json.loads(answer).get("num_up_osds"))
    except (ServerError, ValueError):
        return False
