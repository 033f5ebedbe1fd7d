"""What a view shows of a State: details only where they are asked for, and erasures also after they have ended."""

from __future__ import annotations

from persist.core import commands as c
from persist.core.erasure import Erasure, Proof
from persist.core.frontier import MINIMUM, Antichain
from persist.core.ids import SeqNo, critical_reader_id_of
from persist.core.named_holds import Tag
from persist.core.record import replace
from persist.core.shard_settings import ShardSettings
from persist.core.shard_view import ShardDetails, ViewRequest, view_of
from persist.formats.http_messages import decode_view, encode_view, view_to_json
from tests.support.shard import Shard

CURSOR = critical_reader_id_of("billing")


def test_details_are_shown_where_they_are_asked_for() -> None:
    shard = Shard()
    shard.one(c.SetSettings(0, 5_000))
    shard.one(c.AdvanceUpper(Antichain(3)))
    shard.one(c.SetTag("eom", 2))
    shard.one(c.RegisterCriticalReader(CURSOR, "opaque", "billing", Antichain(1)))
    view = view_of(shard.state, ViewRequest(with_details=True))
    tags, cursors = {"eom": Tag(2)}, {CURSOR: Antichain(1)}
    assert view.details == ShardDetails(ShardSettings(5_000, version=1), tags, cursors)
    assert decode_view(encode_view(view)) == view
    assert "details" not in view_to_json(view)
    assert view_of(shard.state, ViewRequest()).details is None


def test_an_erasure_that_has_ended_is_shown() -> None:
    """Who has read rows before it must not write them once more."""
    shard = Shard()
    assert view_of(shard.state, ViewRequest()).erased == MINIMUM
    ended = Erasure(7, b"", 0, proof=Proof(0, SeqNo(1), 1, 1, 1))
    state = replace(shard.state, erasures={"e" + "1" * 32: ended})
    assert view_of(state, ViewRequest()).erased == Antichain(7)
