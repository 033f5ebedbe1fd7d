"""What the commit history is told of a write by Spark, besides what the caller says: application, job and user.

Only tasks know them: whoever commits is a process of its own that Spark tells nothing. So tasks send it along.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping
from contextlib import suppress

from pyspark import TaskContext

from persist.client.telling import info_bytes
from persist.core.errors import InvalidUsage
from persist.core.recorded import Caller
from persist.spark.options import WriteOptions

TEXT_MAX = 200  # characters of each
_PROPERTIES = {
    "application": "spark.app.id",
    "job": "spark.job.description",
    "group": "spark.jobGroup.id",
    "execution": "spark.sql.execution.id",
    "query": "sql.streaming.queryId",
}


def task_tells() -> dict[str, str]:
    """What this task knows of its application; empty outside of a task."""
    context = TaskContext.get()
    if context is None:
        return {}
    found = {name: context.getLocalProperty(known) for name, known in _PROPERTIES.items()}
    return {name: value[:TEXT_MAX] for name, value in (found | {"user": _user()}).items() if value}


def options_tell(options: WriteOptions) -> dict[str, str]:
    """What the options of a write say of itself, by which it is found again."""
    found = {} if options.write_id is None else {"write": options.write_id}
    return found if options.txn is None else found | transaction_told(options.txn)


def transaction_told(txn: tuple[str, int]) -> dict[str, str]:
    """What the commit history tells of a transaction."""
    return {"txnAppId": txn[0][:TEXT_MAX], "txnVersion": str(txn[1])}


def caller(purpose: str, told: Mapping[str, str], info: bytes) -> Caller:
    """Who writes. What Spark tells stands under `spark`, unless `info` has that itself, or there is no room for it."""
    if told:
        both = {"spark": dict(told), **(json.loads(info) if info else {})}
        with suppress(InvalidUsage):
            return Caller(purpose=purpose, info=info_bytes("option 'info'", both))
    return Caller(purpose=purpose, info=info)


def _user() -> str:
    """The user of the process that runs the task."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run under a number without a name
        return str(os.getuid())
