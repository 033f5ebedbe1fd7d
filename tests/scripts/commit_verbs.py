"""The verbs of scripts that drive a committer over stores that do as the script says.

    machine retry=0.2 queue=3 group=2 merges=yes rollup-every=8 room=20000 value-bytes=4000
                                   a new shard, and a new machine with these settings (the rest is as usual)
    submit <command>               queue a command; whether its caller leads, waits, or was refused
    commit                         let the callers that were told to lead do it: outcomes, and what the log got
    <command>                      as `submit` and `commit`
    another <command>              another machine on the same shard commits that
    fill 15                        that many commits, each of an insert of one row by w4
    upkeep                         do the background work that waits
    store: lose-next 2             the next compare-and-sets lose against another machine's commits
    store: unknown-next <what>     the next compare-and-set has no answer. What became of it: landed, lost (it never
                                   arrived) or taken (it never arrived, and another machine's commit took its place)
    store: meanwhile <command>     the command is submitted while the next compare-and-set is under way
    store: breaks-next             the next compare-and-set fails as only a bug fails
    store: away | back             the store of the log answers nobody, or everybody again
    store: reads-away | back       as that, but compare-and-sets are answered
    blobs: away | back             the store of the blobs takes and gives nothing, or all again
    blobs: away-after 1            as `away`, from the second write on
    batches | metrics              the batches of the State and where their rows are; the machine's counters but for 0

Commands are those of `verbs`. Data commands take `rows=<count>` for inline rows. A commit prints an outcome for each
command, numbered in the order in which they were submitted, and an entry of the log for each commit: which machine
made it and what it changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from blob import BlobUnavailable
from blob.memory_blobs import MemoryBlob
from blob.metrics import ForwardingBlob
from consensus import ConsensusIndeterminate, ConsensusUnavailable, Entry
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import ForwardingConsensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.commit_plan import Outcome
from persist.commit.committer import Machine
from persist.commit.location import Location, LocationSettings
from persist.core import commands as c
from persist.core.batch import HollowBatch, Run
from persist.core.errors import PersistError
from persist.core.ids import Token, WriterId, mint
from persist.core.record import asdict
from persist.core.state import Policy
from persist.core.state_diff import MapDiff, StateDiff
from persist.formats.state_frames import decode_diff
from tests.scripts.harness import Arguments, ScriptError, print_error
from tests.scripts.verbs import COMMANDS, parse_command, parse_frontier, parse_written, short, show_result
from tests.support.location import AscendingIds, TestClock
from tests.support.shard import NAME, first_write, numbered

SCHEMA = pa.schema([("id", pa.int64())])
OURS, ANOTHER, STAGING = 0, 1, 2  # origins of ids, and so of commits
COUNTERS = ("commits", "commands", "group_max", "races_lost", "retries", "spills", "flushes")
UPKEEP_COUNTERS = ("upkeep_failed", "upkeep_refused")
_BYTES = re.compile(r"\b\d+ bytes")  # as many as the format takes


class ScriptedLog(ForwardingConsensus):
    """The store of the log. `fates` say what becomes of the next compare-and-sets, `meanwhile` happens during one."""

    def __init__(self, value_bytes_max: int) -> None:
        super().__init__(MemoryConsensus("mem:", value_bytes_max=value_bytes_max))
        self.fates: list[Callable[[Callable[[], bool]], bool]] = []
        self.meanwhile: list[Callable[[], object]] = []
        self.writes_away = self.reads_away = False

    @property
    def inner(self) -> MemoryConsensus:
        assert isinstance(self._inner, MemoryConsensus)
        return self._inner

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        def real() -> bool:
            return self._inner.compare_and_set(key, seqno, data, after)

        while self.meanwhile:
            self.meanwhile.pop(0)()
        if self.fates:
            return self.fates.pop(0)(real)
        if self.writes_away:
            raise ConsensusUnavailable("nobody answers")
        return real()

    def head(self, key: str) -> Entry | None:
        self._read()
        return self._inner.head(key)

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        self._read()
        return self._inner.scan(key, from_seqno, limit)

    def _read(self) -> None:
        if self.reads_away:
            raise ConsensusUnavailable("nobody answers")


class ScriptedBlob(ForwardingBlob):
    """The store of the blobs, which takes `room` more of them (None: any number)."""

    room: int | None = None

    def put(self, key: str, data: bytes | memoryview) -> None:
        if self.room is not None:
            if self.room == 0:
                raise BlobUnavailable("nobody answers")
            self.room -= 1
        super().put(key, data)


class LateBackground:
    """Keeps the work that waits until the script asks for it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> bool:
        self.waiting.append(work)
        return True

    def close(self) -> None:
        return


class CommitInterpreter:
    """One shard, a machine that commits on it, and another machine elsewhere."""

    def __init__(self) -> None:
        self._begin(Arguments("machine", []))

    def __call__(self, group: list[Arguments]) -> list[str]:
        [args] = group
        with patch("persist.commit.committer.RETRY_S", self._retry_s):
            return self._run(args)

    def _run(self, args: Arguments) -> list[str]:
        directives: dict[str, Callable[[Arguments], list[str]]] = {
            "machine": self._begin, "submit": self._submit, "commit": lambda _: self._commit(),
            "another": self._another, "fill": self._fill, "upkeep": self._upkeep, "store:": self._store,
            "blobs:": self._blobs, "batches": lambda _: show_batches(self.machine.state().trace.batches),
            "metrics": self._metrics,
        }  # fmt: skip
        if args.verb in directives:
            printed = directives[args.verb](args)
            args.finish()
            return printed
        command = self._command(args)
        args.finish()
        told = self._queue(command)
        return [*([] if "leads" in told[0] else told), *self._commit()]

    # --- the shard and its machines

    def _begin(self, args: Arguments) -> list[str]:
        self.log = ScriptedLog(args.number("value-bytes", 1 << 20))
        blobs = MemoryBlob("mem:")
        self.blob = ScriptedBlob(blobs)
        self.clock, self.background = TestClock(), LateBackground()
        policy = Policy(
            inline_part_bytes_max=args.number("part", 64 * 1024),
            inline_shard_bytes_max=args.number("room", 1 << 20),
            rollup_every=args.number("rollup-every", 1_000),
            inline_batches=args.number("inline-batches", 16),
        )
        self._retry_s = float(args.named("retry", "5"))
        merges = args.named("merges", "no") == "yes"

        def location(origin: int, log: Any, blob: Any, policy: Policy) -> Location:
            return Location(
                blob,
                log,
                settings=LocationSettings(policy, check_all=True, small_merges=merges, compares_clock=False),
                clock=self.clock,
                ids=AscendingIds(origin),
                background=self.background if origin == OURS else LateBackground(),
            )

        # The other machine reaches the stores whatever becomes of the script's. Staging knows no limit of inline rows.
        elsewhere = Client(EmbeddedTransport(location(STAGING, self.log.inner, blobs, Policy())))
        elsewhere.create_shard(NAME, SCHEMA, ["id"])
        self._rows = elsewhere.shard(NAME).open_writer()
        self.another: Machine = location(ANOTHER, self.log.inner, self.blob, policy).machine(NAME)
        with patch.multiple(
            "persist.commit.committer", QUEUE_MAX=args.number("queue", 100), GROUP_MAX=args.number("group", 100)
        ):
            self.machine: Machine = location(OURS, self.log, self.blob, policy).machine(NAME)
        for number in range(1, 5):
            self.another.apply(first_write(WriterId(numbered("w", number)), 3_600_000))
        self.machine.refresh()
        self._seen: int = self.machine.state().seqno
        self._rivals = 90
        self._submitted = 0
        self._leads: list[Callable[[], None]] = []
        self._outcomes: dict[int, Outcome] = {}
        return ["ok"]

    # --- committing

    def _submit(self, args: Arguments) -> list[str]:
        return self._queue(self._nested(args))

    def _queue(self, command: c.Command) -> list[str]:
        leads = len(self._leads)
        number = self._submitted + 1
        try:
            self.machine.submit(command, self._leads.append, lambda outcome: self._answered(number, outcome))
        except PersistError as error:
            return [short(print_error(error))]
        self._submitted = number
        return [f"{number} leads" if len(self._leads) > leads else f"{number} waits"]

    def _answered(self, number: int, outcome: Outcome) -> None:
        assert number not in self._outcomes, "a command is answered once"
        self._outcomes[number] = outcome

    def _commit(self) -> list[str]:
        printed = []
        while self._leads:
            try:
                self._leads.pop(0)()
            except RuntimeError as error:  # a bug that the script has asked for
                printed.append(f"the leader fails: {error}")
            printed += [f"{number}: {show_outcome(self._outcomes.pop(number))}" for number in sorted(self._outcomes)]
            printed += self._new_entries()
        return printed

    def _another(self, args: Arguments) -> list[str]:
        return [show_outcome(self.another.apply(self._nested(args))), *self._new_entries()]

    def _fill(self, args: Arguments) -> list[str]:
        for _ in range(int(args.next("how many"))):
            token = mint(Token, AscendingIds(self.machine.state().seqno))
            self.machine.apply(c.Insert(WriterId(numbered("w", 4)), token, self._staged(1, None)))
        return [f"filled: {len(self._new_entries())} entries"]

    def _upkeep(self, _: Arguments) -> list[str]:
        waiting, self.background.waiting = self.background.waiting, []
        for work in waiting:
            work()
        return [f"did {len(waiting)}", *self._new_entries()]

    def _nested(self, args: Arguments) -> c.Command:
        """The command that follows a directive."""
        args.verb = args.next("a command")
        return self._command(args)

    def _command(self, args: Arguments) -> c.Command:
        if args.verb not in COMMANDS:
            raise ScriptError(f"there is no verb {args.verb!r}")
        rows = args.optional("rows")
        if rows is None:
            return parse_command(args.verb, args)
        writer, token = parse_written(args)
        if args.verb == "insert":
            return c.Insert(writer, token, self._staged(int(rows), None))
        lower, upper = parse_frontier(args.next("a frontier")), parse_frontier(args.next("a frontier"))
        kind = {"append": c.Append, "compare-and-append": c.CompareAndAppend}[args.verb]
        return kind(writer, token, lower, upper, self._staged(int(rows), lower.element))

    def _staged(self, rows: int, time: int | None) -> tuple[Run, ...]:
        return self._rows.stage_for_one_commit(pa.table({"id": pa.array(range(rows), pa.int64())}), time)

    # --- the stores

    def _store(self, args: Arguments) -> list[str]:
        what = args.next("what becomes of it")
        if what == "lose-next":
            self.log.fates += [self._lost] * int(args.next("how often"))
        elif what == "unknown-next":
            self.log.fates.append(self._unknown(args.next("landed, lost or taken")))
        elif what == "meanwhile":
            command = self._nested(args)
            self.log.meanwhile.append(lambda: self._queue(command))
        elif what == "breaks-next":
            self.log.fates.append(broken)
        elif what in ("away", "reads-away", "back"):
            self.log.reads_away = what != "back"
            self.log.writes_away = what == "away"
        else:
            raise ScriptError(f"a store does not {what}")
        return ["ok"]

    def _rival_commits(self) -> None:
        self._rivals += 1
        self.another.apply(first_write(WriterId(numbered("w", self._rivals)), 3_600_000))

    def _lost(self, real: Callable[[], bool]) -> bool:
        self._rival_commits()
        return real()

    def _unknown(self, fate: str) -> Callable[[Callable[[], bool]], bool]:
        acts = {"landed": lambda real: real(), "lost": lambda real: None, "taken": lambda real: self._rival_commits()}
        if fate not in acts:
            raise ScriptError(f"an unknown outcome is landed, lost or taken, not {fate}")

        def unknown(real: Callable[[], bool]) -> bool:
            acts[fate](real)
            raise ConsensusIndeterminate("the answer was lost")

        return unknown

    def _blobs(self, args: Arguments) -> list[str]:
        what = args.next("away, away-after or back")
        if what not in ("away", "away-after", "back"):
            raise ScriptError(f"a store does not {what}")
        self.blob.room = {"away": 0, "back": None}[what] if what != "away-after" else int(args.next("how many"))
        return ["ok"]

    # --- looking

    def _metrics(self, _: Arguments) -> list[str]:
        counted = ((name, getattr(self.machine.metrics, name)) for name in COUNTERS + UPKEEP_COUNTERS)
        return [" ".join(f"{name}={value}" for name, value in counted if value) or "nothing"]

    def _new_entries(self) -> list[str]:
        entries = self.log.inner.scan(NAME, self._seen + 1, 1_000)
        self._seen += len(entries)
        return [show_entry(decode_diff(entry.data)) for entry in entries]


def broken(_: Callable[[], bool]) -> bool:
    raise RuntimeError("a bug")


def show_outcome(outcome: Outcome) -> str:
    if isinstance(outcome, BaseException) and not isinstance(outcome, PersistError):
        return f"error {type(outcome).__name__}: {outcome}"
    return _BYTES.sub("N bytes", show_result(outcome))


def show_entry(change: StateDiff) -> str:
    words = [f"log v{change.seqno}", "another's:" if int(change.commit_id[-8:], 16) == ANOTHER else "ours:"]
    if change.elsewhere is not None:
        words.append("in a blob")
    if change.trace is not None:
        came, gone = len(change.trace.batches), change.trace.count
        words.append(f"batches {gone} -> {came}" if gone else f"batches +{came}")
    for name, mapping in sorted(asdict(change).items()):
        if not isinstance(mapping, MapDiff) or (name == "writers" and change.trace is not None):
            continue  # an append is remembered with its writer
        came, gone = len(mapping.set), len(mapping.deleted)
        words.append(name + (f"+{came}" if came else "") + (f"-{gone}" if gone else ""))
    return " ".join(words)


def show_batches(batches: Sequence[HollowBatch]) -> list[str]:
    """A line for each stretch of batches that are alike."""
    printed = []
    for (rows, where), alike in groupby(batches, lambda batch: (batch.rows, show_parts(batch))):
        stretch = list(alike)
        count = "batch" if len(stretch) == 1 else f"{len(stretch)} batches"
        printed.append(f"{count} {stretch[0].desc.lower}{stretch[-1].desc.upper} rows={rows} {where}".rstrip())
    return printed


def show_parts(batch: HollowBatch) -> str:
    parts = ["inline" if part.is_inline else "blob" for part in batch.parts()]
    return " ".join(f"{parts.count(kind)} {kind}" for kind in ("inline", "blob") if kind in parts)
