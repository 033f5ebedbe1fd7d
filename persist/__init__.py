"""persist: durable, definite time-varying collections for PySpark on blob storage and a compare-and-set log.

`persist.connect(url)` returns a `Client`, which creates and opens a `Shard`; every public name is an attribute of this
package. A name is loaded on first use, so `import persist` loads neither Arrow nor a store.
"""

from __future__ import annotations

import importlib
import logging
import os
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persist.attributes import Attributes
    from persist.client.client import Client, Connection, connect
    from persist.client.column_retention import ColumnRun
    from persist.client.contents_diff import Changes, ChangesSplit
    from persist.client.erasure_api import ErasureStatus
    from persist.client.history_api import ShardTag
    from persist.client.listen import Listen, ListenEvent, Subscription
    from persist.client.many_shards import Cut, CutTruncated, ShardDropped, ShardsDropped, ShardSummary, ShardTruncated
    from persist.client.merge import Merge, source, target
    from persist.client.optimistic_edit import Edited
    from persist.client.pipelined import PipelinedWriter, PipelineSettings
    from persist.client.restore_and_truncate import Restored, Truncated
    from persist.client.row_retention import RetentionRun, RowRetention
    from persist.client.scan import Scan
    from persist.client.shard import CriticalReaderHandle, HandleSettings, Optimized, Shard, Vacuumed
    from persist.client.snapshot import ReadLease, ReadSettings, Snapshot, SnapshotSplit
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
    from persist.core.ids import Token
    from persist.parts import ShardSchema

    __version__: str

__all__ = ["connect", "Client", "Connection", "Shard", "ShardSchema", "Snapshot", "SnapshotSplit", "Listen", "ShardTag"]
__all__ += ["ListenEvent", "ReadLease", "WriteHandle", "PipelinedWriter", "CriticalReaderHandle", "Attributes"]
__all__ += ["AttributeKey", "attribute_key", "named_key", "AttributeUpdate", "BYTE_COUNT", "EVENT_COUNT", "Antichain"]
__all__ += ["Appended", "Token", "Changes", "ChangesSplit", "Restored", "Truncated", "Cut"]
__all__ += ["CutTruncated", "ShardTruncated", "RowRetention", "RetentionRun", "ShardSummary", "ShardDropped"]
__all__ += ["ShardsDropped", "ErasureStatus", "ColumnRun", "Subscription", "Scan"]
__all__ += ["Edited", "Merge", "source", "target", "Optimized", "Vacuumed"]
__all__ += ["HandleSettings", "LocationSettings", "PipelineSettings", "ReadSettings", "WriteSettings"]
__all__ += ["PersistError", "InvalidUsage", "UnknownShard", "ShardExists", "NegativeMultiplicity", "Unauthorized"]
__all__ += ["Forbidden", "ReadOnly", "Conflict", "UpperMismatch", "OpaqueMismatch", "AttributeMismatch"]
__all__ += ["SchemaMismatch"]
__all__ += ["Expired", "NotReadable", "Overloaded", "Unavailable", "Indeterminate", "UpgradeNeeded", "Corruption"]
__all__ += ["TokenReused", "OutcomeForgotten", "HistoryLost", "ConstraintViolated", "NotComplete"]
__all__ += ["__version__"]

# The modules of these names, in the order in which they are searched: modules that load Arrow come last.
_MODULES = (
    "core.errors", "core.frontier", "core.attribute", "core.ids", "core.commands", "client.client",
    "client.pipelined", "client.listen", "client.write", "client.history_api", "client.snapshot",
    "client.contents_diff", "client.restore_and_truncate", "client.row_retention",
    "client.erasure_api", "client.column_retention", "client.many_shards",
    "client.read_api", "client.optimistic_edit", "client.merge", "client.shard", "attributes", "client.scan",
)  # fmt: skip

# Without this, Python prints each warning in a program that configures no logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def _check_neighbours() -> None:
    """Raise ImportError if a module of the user hides one of the packages that belong to this one."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in ("blob", "consensus", "rpc", "compactor"):
        spec = PathFinder.find_spec(name)
        origin = None if spec is None else spec.origin
        if origin is not None and not os.path.abspath(origin).startswith(os.path.join(home, name) + os.sep):
            raise ImportError(f"{origin} hides the package {name!r} of persist: rename it, or run Python elsewhere")


_check_neighbours()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            value = _version()
        elif name in __all__:
            modules = (importlib.import_module(f"persist.{module}") for module in _MODULES)
            value = next(vars(module)[name] for module in modules if name in vars(module))
        else:
            raise AttributeError(f"module 'persist' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("persist-shards")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"
