"""What the console costs: the browser that shows it, and the server that is looked at.

    python -m bench.console [--shards 10000] [--seconds 30]

`list`: a real browser opens a page over so many shards. It is interactive when the first rows are there, a frame was
drawn and a key was answered; what counts begins with the server's first answer. Then it scrolls through all of them,
each frame timed by the browser. `open`: a server over SQLite with a shard that is written once a second. The CPU of the
server is compared while nobody looks and while a browser has the shard open; the reads of the log while the
console follows are compared with those of a listener. Needs chromium, chromium-driver and selenium.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

import persist
from bench.bars import bar, percentile
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.commit.location import Location
from tests.services.chromium import Browser, start_chromium
from tests.support.forked import Forked
from tests.support.location import InlineBackground
from tests.support.served import Served
from tests.support.server import Server

SCHEMA = pa.schema([("id", pa.int64())])
TICKS = os.sysconf("SC_CLK_TCK")
FRAMES = 120
READY = """
const [done] = arguments;
const first = () => performance.getEntriesByType('resource').find((one) => one.name.includes('v1/shards'));
const look = () => {
  if (document.querySelectorAll('.row').length < 10 || !first()) return requestAnimationFrame(look);
  const list = document.querySelector('.list');
  list.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowDown', bubbles: true }));
  return requestAnimationFrame(() => setTimeout(() => done(performance.now() - first().responseEnd)));
};
look();
"""
SCROLL = """
const [frames, done] = arguments;
const list = document.querySelector('.list'), taken = [];
let last = performance.now(), at = 0;
const frame = () => {
  const now = performance.now();
  taken.push(now - last);
  last = now;
  if (at === frames) return done(taken.slice(1));
  at += 1;
  list.scrollTop = (list.scrollHeight * at) / frames;
  return requestAnimationFrame(frame);
};
requestAnimationFrame(frame);
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    browser = start_chromium()
    try:
        many_shards(browser, args.shards)
        open_shard(browser, args.seconds)
    finally:
        browser.close()


def many_shards(browser: Browser, shards: int) -> None:
    location = Location(MemoryBlob(), MemoryConsensus(), background=InlineBackground())
    with Served(location) as served:
        for number in range(shards):
            served.client.create_shard(f"s{number:06}", SCHEMA, ["id"])
        browser.open(f"{served.url}/console")
        ready_ms = float(browser.driver.execute_async_script(READY))
        while browser.run("return document.querySelector('.list').scrollHeight") < 44 * shards:
            time.sleep(0.1)
        frames = [float(one) for one in browser.driver.execute_async_script(SCROLL, FRAMES)]
    location.close()
    shown = [percentile(frames, 0.5), percentile(frames, 0.99), max(frames)]
    print(f"{shards:,} shards: interactive after {ready_ms:.0f} ms; a frame while scrolling, in ms:", end=" ")
    print("median {:.1f}, 99 % within {:.1f}, longest {:.1f}".format(*shown))
    bar(f"seconds until a page over {shards:,} shards is interactive", ready_ms / 1000, "<= 2")
    bar("ms of the longest frame while scrolling", max(frames), "<= 100")


def open_shard(browser: Browser, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "data") as server:
        with persist.connect(server.url) as client:
            client.create_shard("orders", SCHEMA, ["id"]).insert([{"id": 0}])
        stop = threading.Event()
        writer = threading.Thread(target=_write, args=(server.url, stop))
        writer.start()
        try:
            alone = _looked(server, seconds)
            with _listening(server):
                listened = _looked(server, seconds)
            browser.open(f"{server.url}/console#/shard/orders")
            time.sleep(3)  # what the page asks for once
            opened = _looked(server, seconds)
        finally:
            stop.set()
            writer.join()
    cpu = 100 * (opened[0] - alone[0]) / seconds
    seen = {"alone": alone, "with a listener": listened, "with the console": opened}
    for how, (cpu_s, calls) in seen.items():
        print(f"the server {how}: {cpu_s:.2f} s of CPU and {calls} reads of its log in {seconds:.0f} s")
    bar("percent of a core that an open console costs", cpu, "<= 2")
    bar("reads of the log a second beyond those of a listener", (opened[1] - listened[1]) / seconds, "<= 0.2")


def _write(url: str, stop: threading.Event) -> None:
    with persist.connect(url) as client:
        shard = client.shard("orders")
        number = 1
        while not stop.wait(1.0):
            shard.insert([{"id": number}])
            number += 1


def _looked(server: Server, seconds: float) -> tuple[float, int]:
    """CPU seconds of the server, and its reads of the log, within so long a time. Polls come when they come: +- 1."""
    assert isinstance(server.process, Forked)
    time.sleep(1)
    pid = server.process.pid
    cpu, calls = _cpu_s(pid), _log_reads(server.url)
    time.sleep(seconds)
    return _cpu_s(pid) - cpu, _log_reads(server.url) - calls


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _log_reads(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    calls = [line for line in lines if line.startswith("persist_store_calls_total") and 'store="consensus"' in line]
    reads = [line for line in calls if any(f'verb="{verb}"' in line for verb in ("head", "scan", "keys"))]
    return int(sum(float(line.split()[-1]) for line in reads))


@contextmanager
def _listening(server: Server) -> Iterator[None]:
    """A listener that takes all that comes."""
    address = f"{server.url}/v1/shards/orders/listen"
    answer = urllib.request.urlopen(urllib.request.Request(address, headers={"accept": "text/event-stream"}))
    ended = threading.Event()

    def read() -> None:
        with suppress(OSError, ValueError, AttributeError):  # it is closed while it waits
            while not ended.is_set() and answer.readline():
                pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()
        answer.close()


if __name__ == "__main__":
    main()
