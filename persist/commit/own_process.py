"""The figures of this process, as every exporter tells them, where `/proc` has them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from persist.formats.exposition import COUNTER, GAUGE, Family, one


def of_process(version: str) -> Iterator[Family]:
    """CPU, memory, open files and the version. On systems without `/proc` the version alone."""
    yield Family("persist_build_info", GAUGE, "Which version this is", ("version",), [((version,), 1.0)])
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        files = len(os.listdir("/proc/self/fd"))
    except OSError:
        return
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    yield one("process_cpu_seconds_total", COUNTER, "Seconds of CPU", cpu_s)
    yield one("process_resident_memory_bytes", GAUGE, "Resident bytes", int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))
    yield one("process_open_fds", GAUGE, "Open files and sockets", files)
    yield one("process_max_fds", GAUGE, "How many there may be", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
