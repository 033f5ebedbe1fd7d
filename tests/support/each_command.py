"""A command of each kind that finds something to do at a shard with ten times."""

from __future__ import annotations

from persist.core import commands as c
from persist.core.attribute import NO_INDEX, AttributeKey, AttributeUpdate
from persist.core.blob_keys import loan_key, rollup_key, spill_key
from persist.core.erasure import Doomed, Proof
from persist.core.frontier import EMPTY, Antichain
from persist.core.ids import CriticalReaderId, LoanId, ReaderId, SeqNo, Token, WriterId
from persist.core.shard_settings import Looked, Rung
from persist.core.spill import ENTRIES, SpillFile
from persist.core.state import SchemaRecord, State
from tests.support.location import AscendingIds
from tests.support.scopes_page import REWRITES, UPPER

KEY = AttributeKey("7" * 32)
READER, OTHER, POINT = (ReaderId("r" + digit * 32) for digit in "123")
WRITER, TOKEN = WriterId("w" + "1" * 32), Token("i" + "1" * 32)
LOAN = LoanId("l" + "1" * 32)
CRITICAL = CriticalReaderId("c" + "1" * 32)
FAR = SeqNo(1_000)


def each_command(state: State) -> list[c.Command]:
    """Commands on a shard of this State, whose upper is `UPPER`: at least one of each kind."""
    shard_id = state.shard_id
    schema = SchemaRecord(b"", ())
    return [
        c.ExpireWriter(WRITER),
        c.CompareAndAppend(WRITER, TOKEN, Antichain(UPPER), Antichain(UPPER + 1), ()),
        c.Append(WRITER, TOKEN, Antichain(UPPER), Antichain(UPPER + 1), ()),
        c.Insert(WRITER, TOKEN, ()),
        *REWRITES.values(),
        c.ReadErasures(),
        c.NoteRewritten("e" + "1" * 32, Doomed()),
        c.ProveErasure("e" + "1" * 32, Proof(1, SeqNo(1), 1, 1, 1)),
        c.AdvanceUpper(Antichain(UPPER + 5)),
        c.UpdateAttributes(WRITER, TOKEN, (AttributeUpdate.replace(KEY, 8),)),
        c.ReadAttributes((KEY,)),
        c.ScanAttributes(KEY),
        c.FlushAttributes(NO_INDEX, NO_INDEX, {}, {}),
        c.Flush(ENTRIES, (), (1,), SpillFile(spill_key(shard_id, AscendingIds()), 1, 0, 1, 1, FAR)),
        c.RegisterReader(READER, Antichain(9), 60_000),
        c.RegisterReader(OTHER, None, 60_000),
        c.DowngradeSince(READER, None, FAR, False),
        c.DowngradeSince(READER, Antichain(9), FAR),
        c.DowngradeSince(OTHER, Antichain(9), FAR),
        c.DowngradeSince(OTHER, EMPTY, FAR),
        c.DowngradeSince(READER, EMPTY, FAR, moves_since=False),
        c.ExpireReader(OTHER),
        c.RegisterCriticalReader(CRITICAL, "", "cursor"),
        c.CompareAndDowngradeSince(CRITICAL, "", "", Antichain(9)),
        c.ExpireCriticalReader(CRITICAL, ""),
        c.ResolveTime(0),
        c.TimesShown(0, 0),
        c.LowerSeal(),
        c.SetSettings(0, 0),
        c.ForgetOutlived(0),
        c.ForgetHistory(Antichain(1)),
        c.SetTag("mine", 1),
        c.SetTag("eom", 2, 1),
        c.RemoveTag("eom"),
        c.ReadRetention(),
        c.TakeCuts((1,), (Rung("hourly-2026-11-23T04Z", 1),)),
        c.NoteLooked(Looked(1, UPPER, 1)),
        c.RegisterReader(POINT, Antichain(2), 60_000, point=True),
        c.DowngradeSince(POINT, Antichain(2), FAR),
        c.ExpireReader(POINT),
        c.Lend(LOAN, "clone", loan_key(shard_id, AscendingIds()), 1, SeqNo(1)),
        c.LendOn(LOAN, "clone", loan_key(shard_id, AscendingIds()), 1, LOAN, ""),
        c.ShrinkLoan(LOAN, "", "", 1),
        c.EndLoan(LOAN),
        c.Returned(LOAN),
        c.BeginClone(state),
        c.HandOver(0, 2),
        c.HandOver(2, 0),
        c.EvolveSchema(1, schema),
        c.Drop(True),
        c.Recreate(schema),
        c.Finalise(),
        c.AddRollup(SeqNo(3), rollup_key(shard_id, SeqNo(3), AscendingIds()), 1),
        c.RemoveRollups(FAR),
        c.HoldClaim("merge:[0]", "me", 60_000, (next(state.trace.parts()).id,)),
        c.ReleaseClaim("merge:[0]", "me"),
        c.ForgetLapsed(staged_before_ms=1),
        c.MergeResult((), (), Antichain(9)),
        c.BundleParts((), ()),
        c.ReplacePart(next(state.trace.parts()).id),
    ]
