"""`persist.bindings`: a definite remap of positions in a source to times. See docs/patterns.md."""

from __future__ import annotations

from persist.patterns.bindings import Bindings as Bindings
from persist.patterns.bindings import BindingsSettings as BindingsSettings
from persist.patterns.ingesting import Ingester as Ingester
from persist.patterns.ingesting import IngestSettings as IngestSettings
from persist.patterns.ingesting import Source as Source
from persist.patterns.minting import Minter as Minter
from persist.patterns.positions import Binding as Binding
