"""What goes on in the simulated processes: each actor is production code and a record of what it was told."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.accountant import accountant
from tests.simulation.chronicle import chronicler
from tests.simulation.cloning import cloner
from tests.simulation.dating import dater
from tests.simulation.erasing import eraser, prover
from tests.simulation.historians import configurator, timekeeper
from tests.simulation.host import Host
from tests.simulation.hostile import hostile
from tests.simulation.ingesting import ingester, minter, taker, tender
from tests.simulation.lifecycle import demolisher, evolver
from tests.simulation.pipelining import pipeliner
from tests.simulation.publishing import announcer, copier, publisher
from tests.simulation.readers import forgetter, holder, listener, snapshot_reader
from tests.simulation.restoring import restorer
from tests.simulation.retaining import retainer
from tests.simulation.tagging import tagger
from tests.simulation.truncating import truncator
from tests.simulation.writers import advancer, cas_writer, inserter, replica

ROLES: dict[str, Callable[[Host], None]] = {
    "cas_writer": cas_writer,
    "inserter": inserter,
    "advancer": advancer,
    "replica": replica,
    "accountant": accountant,
    "pipeliner": pipeliner,
    "evolver": evolver,
    "demolisher": demolisher,
    "snapshot_reader": snapshot_reader,
    "listener": listener,
    "holder": holder,
    "forgetter": forgetter,
    "hostile": hostile,
    "chronicler": chronicler,
    "timekeeper": timekeeper,
    "configurator": configurator,
    "tagger": tagger,
    "restorer": restorer,
    "truncator": truncator,
    "retainer": retainer,
    "dater": dater,
    "cloner": cloner,
    "publisher": publisher,
    "announcer": announcer,
    "copier": copier,
    "eraser": eraser,
    "prover": prover,
    "minter": minter,
    "ingester": ingester,
    "taker": taker,
    "tender": tender,
}

__all__ = ["ROLES"]
