"""Attributes of a shard: the handle that users have, and the index that holds what outgrows the State."""

from __future__ import annotations

from persist.attribute import BYTE_COUNT, EVENT_COUNT, AttributeKey, AttributeUpdate
from persist.attributes.handle import Attributes

__all__ = ["BYTE_COUNT", "EVENT_COUNT", "AttributeKey", "AttributeUpdate", "Attributes"]
