"""`persist.bindings`: a definite remap of positions in a source to times. See docs/streaming.md."""

from __future__ import annotations

from persist.patterns.ingest import Ingester as Ingester
from persist.patterns.ingest import IngestSettings as IngestSettings
from persist.patterns.ingest import Minter as Minter
from persist.patterns.ingest import Source as Source
from persist.patterns.reclock import Binding as Binding
from persist.patterns.reclock import Bindings as Bindings
