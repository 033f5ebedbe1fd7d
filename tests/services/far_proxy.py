"""A proxy before an S3 server that makes it far: every request waits, and every connection has a rate.

    python -m tests.services.far_proxy --target PORT --request-ms 30 --mb-per-s 100

prints its port and stays until its standard input ends: in a process of its own it takes no turns from those that it
measures. It counts as `metering_proxy` does. A head waits before it is passed on, whatever its kind; then bytes pass at
the rate, each way by itself. What the server takes comes on top.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.services.metering_proxy import MeteringConnection, MeteringProxy

BURST_S = 0.002  # that a connection may make up after its thread had no turn
MB = 1_000_000


class Pace:
    """When bytes may pass at a rate: `after(count, now)` tells how many seconds they have to wait."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def after(self, count: int, now: float) -> float:
        """Seconds from `now`, by a monotonic clock, until `count` more bytes have passed."""
        if self._bytes_per_s is None:
            return 0.0
        self._free_at = max(self._free_at, now - BURST_S) + count / self._bytes_per_s
        return max(0.0, self._free_at - now)


class FarProxy(MeteringProxy):
    """Holds each request for `request_s` seconds; `bytes_per_s` of each connection, None: as fast as it goes."""

    def __init__(
        self,
        target: int,
        *,
        host: str = "127.0.0.1",
        request_s: float = 0.0,
        bytes_per_s: float | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.request_s = request_s
        self.bytes_per_s = bytes_per_s
        self.sleep = sleep
        super().__init__(target, host=host)

    def connection(self) -> MeteringConnection:
        return _FarConnection(self)

    def hold(self, seconds: float) -> None:
        """Keep a connection waiting."""
        if seconds > 0:
            self.sleep(seconds)


class _FarConnection(MeteringConnection):
    """Keeps the bytes of one connection until it is their time: who hears them passes them on afterwards."""

    def __init__(self, proxy: FarProxy) -> None:
        super().__init__(proxy)
        self._far = proxy
        self._up, self._down = Pace(proxy.bytes_per_s), Pace(proxy.bytes_per_s)

    def sent(self, data: bytes) -> None:
        before = self.requests
        super().sent(data)
        held = (self.requests - before) * self._far.request_s
        self._far.hold(held + self._up.after(len(data), time.monotonic() + held))

    def received(self, data: bytes) -> None:
        super().received(data)
        self._far.hold(self._down.after(len(data), time.monotonic()))


@contextmanager
def far(target: int, *, request_s: float, bytes_per_s: float) -> Iterator[str]:
    """A proxy in a process of its own, for as long as the block lasts: its endpoint."""
    command = [sys.executable, "-m", "tests.services.far_proxy", "--target", str(target)]
    options = ["--request-ms", str(request_s * 1000), "--mb-per-s", str(bytes_per_s / MB)]
    process = subprocess.Popen([*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline().decode().strip()
        assert port, "the proxy did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=int, required=True, help="port of the server on loopback")
    parser.add_argument("--request-ms", type=float, default=30.0)
    parser.add_argument("--mb-per-s", type=float, default=100.0, help="of one connection, each way")
    asked = parser.parse_args()
    with FarProxy(asked.target, request_s=asked.request_ms / 1000, bytes_per_s=asked.mb_per_s * MB) as proxy:
        print(proxy.port, flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
