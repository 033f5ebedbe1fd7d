"""persist: durable, definite time-varying collections for PySpark on blob storage and a compare-and-set log.

`persist.connect(url)` gives a `Client`, which creates and opens a `Shard`; every public name is an attribute of this
package. A name is loaded when it is first asked for, so that `import persist` loads neither Arrow nor a store.
"""

from __future__ import annotations

import importlib
import logging
import os
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persist.attributes import Attributes
    from persist.client.connect import Client, Connection, connect
    from persist.client.contents_diff import Changes, ChangesSplit
    from persist.client.erasure_api import ErasureStatus
    from persist.client.history_api import ShardTag
    from persist.client.listen import Listen, ListenEvent
    from persist.client.maintaining import Optimized, Vacuumed
    from persist.client.merge import Merge, source, target
    from persist.client.optimistic_edit import Edited
    from persist.client.pipelined import PipelinedWriter, PipelineSettings
    from persist.client.read_api import Subscription
    from persist.client.read_leases import CriticalReaderHandle
    from persist.client.retention_kinds import ColumnRun
    from persist.client.rewrites import Restored, Truncated
    from persist.client.row_retention import RetentionRun, RowRetention
    from persist.client.scan import Scan
    from persist.client.shard import HandleSettings, Shard
    from persist.client.shard_listing import ShardDropped, ShardsDropped, ShardSummary
    from persist.client.snapshot import ReadLease, ReadSettings, Snapshot, SnapshotSplit
    from persist.client.stream_cuts import Cut, CutTruncated, ShardTruncated
    from persist.client.write import WriteHandle, WriteSettings
    from persist.commit.location import LocationSettings
    from persist.core.attribute import BYTE_COUNT, EVENT_COUNT, AttributeKey, AttributeUpdate, attribute_key, named_key
    from persist.core.commands import Appended
    from persist.core.frontier import Antichain

    # isort: off
    from persist.core.errors import AttributeMismatch, Conflict, ConstraintViolated, Corruption, Expired, Forbidden
    from persist.core.errors import HistoryLost, NotComplete, ReadOnly
    from persist.core.errors import Indeterminate, InvalidUsage, NegativeMultiplicity, NotReadable, OpaqueMismatch
    from persist.core.errors import OutcomeForgotten, Overloaded, PersistError, SchemaMismatch, ShardExists
    from persist.core.errors import TokenReused, Unauthorized, Unavailable, UnknownShard, UpgradeNeeded, UpperMismatch

    # isort: on
    from persist.core.ids import Token, token_of_key
    from persist.parts import ShardSchema

    __version__: str

__all__ = ["connect", "Client", "Connection", "Shard", "ShardSchema", "Snapshot", "SnapshotSplit", "Listen", "ShardTag"]
__all__ += ["ListenEvent", "ReadLease", "WriteHandle", "PipelinedWriter", "CriticalReaderHandle", "Attributes"]
__all__ += ["AttributeKey", "attribute_key", "named_key", "AttributeUpdate", "BYTE_COUNT", "EVENT_COUNT", "Antichain"]
__all__ += ["Appended", "Token", "token_of_key", "Changes", "ChangesSplit", "Restored", "Truncated", "Cut"]
__all__ += ["CutTruncated", "ShardTruncated", "RowRetention", "RetentionRun", "ShardSummary", "ShardDropped"]
__all__ += ["ShardsDropped", "ErasureStatus", "ColumnRun", "Subscription", "Scan"]
__all__ += ["Edited", "Merge", "source", "target", "Optimized", "Vacuumed"]
__all__ += ["HandleSettings", "LocationSettings", "PipelineSettings", "ReadSettings", "WriteSettings"]
__all__ += ["PersistError", "InvalidUsage", "UnknownShard", "ShardExists", "NegativeMultiplicity", "Unauthorized"]
__all__ += [
    "Forbidden",
    "ReadOnly",
    "Conflict",
    "UpperMismatch",
    "OpaqueMismatch",
    "AttributeMismatch",
    "SchemaMismatch",
]
__all__ += ["Expired", "NotReadable", "Overloaded", "Unavailable", "Indeterminate", "UpgradeNeeded", "Corruption"]
__all__ += ["TokenReused", "OutcomeForgotten", "HistoryLost", "ConstraintViolated", "NotComplete"]
__all__ += ["__version__"]

# Where names live, in the order in which they are looked for: what needs Arrow comes last.
_HOMES = ["core.errors", "core.frontier", "core.attribute", "core.ids", "core.commands", "client.connect"]
_HOMES += [
    "client.pipelined",
    "client.listen",
    "client.write",
    "client.history_api",
    "client.snapshot",
    "client.contents_diff",
]
_HOMES += [
    "client.rewrites",
    "client.rewrites",
    "client.stream_cuts",
    "client.stream_cuts",
    "client.row_retention",
    "client.erasure_api",
]
_HOMES += [
    "client.retention_kinds",
    "client.shard_listing",
    "client.maintaining",
    "client.read_api",
    "client.optimistic_edit",
]
_HOMES += ["client.merge", "client.shard", "attributes", "client.scan"]


# A program that configures no logs is told by errors alone. Without this Python shows it each warning, too.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def _check_neighbours() -> None:
    """Raise ImportError if a file of the user's own hides one of the packages that belong to this one."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in ("blob", "consensus", "rpc", "compactor"):
        spec = PathFinder.find_spec(name)
        found = None if spec is None else spec.origin
        if found is not None and not os.path.abspath(found).startswith(os.path.join(home, name) + os.sep):
            raise ImportError(f"{found} hides the package {name!r} of persist: rename it, or run Python elsewhere")


_check_neighbours()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            found = _version()
        elif name in __all__:
            homes = (importlib.import_module(f"persist.{home}") for home in _HOMES)
            found = next(vars(home)[name] for home in homes if name in vars(home))
        else:
            raise AttributeError(f"module 'persist' has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("persist-shards")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"
