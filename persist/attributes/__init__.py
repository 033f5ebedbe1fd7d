"""Attributes of a shard: the public handle, and the index that stores the attributes that outgrow the State."""

from __future__ import annotations

from persist.attributes.attribute_handle import Attributes
from persist.core.attribute import BYTE_COUNT, EVENT_COUNT, AttributeKey, AttributeUpdate

__all__ = ["BYTE_COUNT", "EVENT_COUNT", "AttributeKey", "AttributeUpdate", "Attributes"]
