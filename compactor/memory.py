"""The allocator of a process that merges."""

from __future__ import annotations

import pyarrow as pa


def use_system_allocator() -> None:
    """Let Arrow take its memory from the C library, for the whole process: to be called where a process begins.

    Arrow's own allocators keep what they were given back for the next time: 125 MiB of 1.2 GiB at the peak of a merge
    of 10 M updates, 50 of 290 MiB where the budget is 24 MiB. The merge is no slower without them.
    """
    pa.set_memory_pool(pa.system_memory_pool())
