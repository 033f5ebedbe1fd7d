"""Tags: single times of a shard that stay readable although since has passed them.

Merges move a time that since has passed to the least kept time at or beyond it, or to since. So what accumulates up to
a kept time stays what it was, and a tag costs what changed since then, not a copy. Pure.
"""

from __future__ import annotations

import re

from persist.core.errors import InvalidUsage
from persist.core.record import Record

TAGS_MAX = 1_000  # of a shard
KEEP_MS_MAX = 36_500 * 24 * 3600 * 1000  # 100 years
_NAME = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,127}")


class Tag(Record, frozen=True):
    """A time that stays readable, up to the instant `until_ms` (UTC, since 1970); None: until it is taken away.

    `laddered`: a policy has set it, and takes it away.
    """

    time: int
    until_ms: int | None = None
    laddered: bool = False


def check_tag_name(name: object) -> str:
    """The name as it is. Raises InvalidUsage where no tag can have it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):  # a path cannot hold these
        raise InvalidUsage(
            f"tag {name!r:.200} is no name of a tag: use 1 to 128 of the characters A-Z a-z 0-9 . _ -, and not - first"
        )
    return name
