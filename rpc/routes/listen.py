"""Streams of updates: every update after a time, once and in order, pushed as it is committed."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(prefix="/v1/shards", tags=["listen"])
