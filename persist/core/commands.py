"""Commands on a shard and their results: one record each. `transitions.step` says what they do.

Commands that write carry their writer and an idempotency token; a retry with the same token answers as the
first time did. Their `attributes` change together with the rows or not at all: AttributeMismatch carries the actual
values when a condition fails. Frontiers are `Antichain`s, intervals half-open, durations in milliseconds.

A class here and its line in `transitions` is all that a command takes. The class says under which scope a caller may
send it; its name in snake case is what tells it from the others when it is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from persist.core.antichain import MINIMUM, Antichain
from persist.core.attribute import AttributeKey, AttributeUpdate, GivenKey, IndexChunk, IndexRoot
from persist.core.batch import Part, Run
from persist.core.ids import CriticalReaderId, PartId, ReaderId, SeqNo, ShardId, Token, WriterId, written
