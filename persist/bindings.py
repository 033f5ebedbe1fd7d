"""`persist.bindings`: a definite remap of positions in a source to times. See docs/streaming.md."""

from __future__ import annotations

from persist.sources.ingest import Ingester as Ingester
from persist.sources.ingest import Minter as Minter
from persist.sources.ingest import Source as Source
from persist.sources.reclock import Binding as Binding
from persist.sources.reclock import Bindings as Bindings
