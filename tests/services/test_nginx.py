"""deploy/nginx: Debian's nginx in front of two servers, with the file that comes with them."""

from __future__ import annotations

import json
import os
import re
import signal
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx2 as httpx
import pyarrow as pa
import pytest

import persist
from rpc.routes import table
from tests.services.process import Server as Process
from tests.services.process import free_ports, port_answers, run
from tests.support.installed import installed
from tests.support.pages import ROOT
from tests.support.server import Server

FILE = ROOT / "deploy" / "nginx" / "persist.conf"
SCHEMA = {"fields": [{"name": "id", "type": "int64", "key": True}, {"name": "text", "type": "string"}]}
NAMES = [f"{region}s{number}" for region in ("", "eu/", "us/") for number in range(6)]
STREAM = {"accept": "text/event-stream"}
MAIN = """\
{user}daemon off;
pid {root}/pid;
error_log {root}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {root}/body;
    proxy_temp_path {root}/proxy;
    fastcgi_temp_path {root}/fastcgi;
    uwsgi_temp_path {root}/uwsgi;
    scgi_temp_path {root}/scgi;
    include {root}/persist.conf;
}}
"""


class Front:
    """nginx with the file of `deploy/nginx`, whose ports are those given here."""

    def __init__(self, root: Path, upstreams: list[int]) -> None:
        root.mkdir()
        (port,) = free_ports(1)
        text = FILE.read_text().replace("listen 8080;", f"listen 127.0.0.1:{port};")
        for old, new in zip(("8787", "8788"), upstreams, strict=True):
            assert f"server 127.0.0.1:{old} " in text
            text = text.replace(f"server 127.0.0.1:{old} ", f"server 127.0.0.1:{new} ")
        (root / "persist.conf").write_text(text)
        (root / "nginx.conf").write_text(MAIN.format(root=root, user="user root;\n" if os.geteuid() == 0 else ""))
        command = [installed("nginx"), "-e", f"{root}/error.log", "-c", f"{root}/nginx.conf"]
        run([*command, "-t"])
        self._port, self._process = port, Process("nginx", command, root / "said", end_signal=signal.SIGTERM)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0)

    def __enter__(self) -> Self:
        self._process.start(lambda: port_answers(self._port))
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._process.stop()

    def create(self, name: str) -> None:
        done(self.http.put(f"/v1/shards/{name}", json=SCHEMA))

    def insert(self, name: str, *ids: int, text: str = "") -> httpx.Response:
        rows = "".join(f"{json.dumps({'id': number, 'text': text})}\n" for number in ids)
        return self.http.post(
            f"/v1/shards/{name}/insert", content=rows, headers={"content-type": "application/x-ndjson"}
        )

    def ids(self, name: str) -> list[int]:
        answer = done(self.http.get(f"/v1/shards/{name}/snapshot", headers={"accept": "application/x-ndjson"}))
        return sorted(json.loads(line)["id"] for line in answer.text.splitlines())


def done(answer: httpx.Response) -> httpx.Response:
    assert answer.status_code < 300, answer.text
    return answer


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    with Server(tmp_path / "data") as one, Server(tmp_path / "data") as other:
        yield [one, other]


@pytest.fixture
def front(tmp_path: Path, servers: list[Server]) -> Iterator[Front]:
    with Front(tmp_path / "nginx", [server.port for server in servers]) as front:
        yield front


def committed(server: Server) -> dict[str, int]:
    """How many commits a server has made to each shard."""
    text = httpx.get(f"{server.url}/metrics").text
    found = re.findall(r'^persist_shard_commits_total\{shard="([^"]+)"\} ([0-9.]+)$', text, re.MULTILINE)
    return {name: int(float(count)) for name, count in found if float(count)}


def test_every_path_of_a_shard_goes_to_one_server_and_both_have_shards(front: Front, servers: list[Server]) -> None:
    for name in NAMES:
        front.create(name)
        for number, path in enumerate((name, name.replace("/", "%2F"), name.replace("/", "%2f"))):
            done(front.insert(path, number))
            done(front.http.put(f"/v1/shards/{path}/tags/t{number}?at={number}"))
        done(front.http.post(f"/v1/shards/{name}/truncate?before=1"))
        assert front.ids(name) == [1, 2] if "/" in name else [0, 1, 2]
    one, other = map(committed, servers)
    assert one.keys() | other.keys() == set(NAMES)
    assert not one.keys() & other.keys()
    assert one
    assert other


def test_the_file_knows_the_paths_of_shards_as_the_servers_do() -> None:
    (pattern,) = re.findall(r'^ +"~(\^/v1/shards/.*)" \$path;$', FILE.read_text(), re.MULTILINE)
    found = re.compile(pattern.replace("(?<", "(?P<"))
    names = [*NAMES[:7], "insert", "eu/tags", "eu%2Flisten", "tags/insert"]
    verbs = ["", *table.VERBS, "retention/run", *(f"{of}/{one}" for of in table.OF_ONE for one in ("x", "tags", "run"))]
    for path in [f"{name}/{verb}".removesuffix("/") for name in names for verb in verbs]:
        split = table.split(table.PREFIX + path)
        assert split is not None
        for query in ("", "?wait=1&where=a/insert"):
            match = found.match(table.PREFIX + path + query)
            assert match is not None
            assert match["path"].replace("%2F", "/") == split[0], path


def test_a_stream_passes_each_event_on_at_once(front: Front) -> None:
    front.create("eu/orders")
    done(front.insert("eu/orders", 1))
    for verb, word in (("listen", "id"), ("trace", "batches")):
        with front.http.stream("GET", f"/v1/shards/eu/orders/{verb}", headers=STREAM) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            events = (json.loads(line[5:]) for line in stream.iter_lines() if line.startswith("data:"))
            assert word in json.dumps(next(events))
            done(front.insert("eu/orders", 2))
            assert word in json.dumps(next(events)), "it comes while the stream is open"


def test_large_bodies_and_long_urls_are_for_the_servers_to_judge(front: Front) -> None:
    front.create("orders")
    done(front.insert("orders", *range(2_000), text="x" * 2_000))
    long = " or ".join(["id = 1"] * 2_000)
    answer = front.http.get("/v1/shards/orders/count", params={"where": long})
    assert (answer.status_code, answer.json()["count"]) == (200, 1)
    assert front.http.get("/v1/shards/orders/count", params={"where": "x" * 40_000}).json()["kind"] == "invalid_usage"


def test_a_server_that_is_gone_is_passed_over_and_a_client_that_knows_all_writes_too(
    front: Front, servers: list[Server]
) -> None:
    for name in NAMES:
        front.create(name)
        done(front.insert(name, 1))
    servers[0].kill()
    for name in NAMES:
        done(front.insert(name, 2))
    with persist.connect(",".join(server.url for server in servers)) as client:
        for name in NAMES:
            client.shard(name).insert(pa.table({"id": [3], "text": [""]}))
            assert front.ids(name) == [1, 2, 3]


class _Ends(socketserver.StreamRequestHandler):
    """Takes a request, with its body, and ends without an answer."""

    def handle(self) -> None:
        head, length = [], 0
        while (line := self.rfile.readline().strip()) != b"":
            head.append(line)
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        self.rfile.read(length)
        self.server.taken.append(head[0])  # type: ignore[attr-defined]


@contextmanager
def ending() -> Iterator[tuple[int, list[bytes]]]:
    """A server that ends each request without an answer: its port, and what it was asked."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Ends) as server:
        taken: list[bytes] = []
        server.taken = taken  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], taken
        server.shutdown()


def test_a_post_that_a_server_has_taken_is_sent_to_no_other_one(tmp_path: Path) -> None:
    """It may have been committed. Only the client knows the token by which it can be sent again."""
    with Server(tmp_path / "data") as server, ending() as (port, taken):
        with Front(tmp_path / "direct", [server.port, server.port]) as direct:
            for name in NAMES:
                direct.create(name)
        with Front(tmp_path / "nginx", [port, server.port]) as front:
            refused = [name for name in NAMES if front.insert(name, 1).status_code == 502]
            assert refused, "the others found it left out for a second"
            assert [line.split()[0] for line in taken] == [b"POST"] * len(refused)
        for name in NAMES:
            count = httpx.get(f"{server.url}/v1/shards/{name}/count").json()["count"]
            assert count == (0 if name in refused else 1)
