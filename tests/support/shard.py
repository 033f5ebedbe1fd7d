"""A shard that is nothing but its State: `step` applies commands, and every law is checked after every commit."""

from __future__ import annotations

from persist.core.audit_log import TokenOutcome
from persist.core.batch import FORMAT_IPC, FORMAT_PARQUET, Part, Run
from persist.core.blob_keys import part_key
from persist.core.commands import Appended, Command, Insert, Result, UpdateAttributes
from persist.core.errors import PersistError
from persist.core.frontier import MINIMUM
from persist.core.ids import PartId, SeqNo, Token, WriterId, shard_id_of
from persist.core.invariants import check_state, check_step
from persist.core.record import replace
from persist.core.spill import OUTCOMES
from persist.core.state import Policy, SchemaRecord, State, initial_state
from persist.core.state_diff import apply, diff, gone_between
from persist.core.transitions import Context, expire_lapsed, step
from persist.core.transitions.context import NOTHING_INDEXED, SOUND
from persist.core.transitions.part_admission import departed
from persist.core.transitions.wall_clocks import stamped
from persist.formats.state_frames import decode_diff, decode_state, encode_diff, encode_state

NAME = "orders"
SCHEMA = SchemaRecord(b"k: string, v: int64", ("k",))


def numbered(letter: str, number: int) -> str:
    """The id of that type with that number, easy to read in a failure. A token is not that of the writer's number."""
    return f"{letter}{'1' if letter == 'i' else '0'}{number:031d}"


def first_write(writer: WriterId, lease_ms: int = 60_000) -> UpdateAttributes:
    """What registers a writer and changes nothing else. Its token is less than all others."""
    return UpdateAttributes(writer, Token("i" + "0" * 24 + "f" * 8), (), lease_ms=lease_ms)


def make_part(
    number: int,
    *,
    rows: int = 1,
    times: tuple[int, int] = (0, 0),
    inline: int | None = None,
    diff_sum: int | None = None,
    schema_id: int = 1,
    shard: str = NAME,
) -> Part:
    """A part that says it has `rows` rows at times in `[times[0], times[1]]`; inline when a size is given."""
    part_id = PartId(numbered("p", number))
    key = part_key(shard_id_of(shard), WriterId(numbered("w", 0)), part_id) if inline is None else None
    return Part(
        id=part_id,
        key=key,
        data=None if inline is None else bytes(inline),
        format=FORMAT_PARQUET if inline is None else FORMAT_IPC,
        schema_id=schema_id,
        rows=rows,
        size=1000 if inline is None else inline,
        checksum=number % 2**32,
        footer_size=8 if inline is None else 0,
        footer_checksum=number % 2**32,
        key_lower=b"\x01a",
        key_upper=b"\x01z",
        time=None,
        time_min=times[0],
        time_max=times[1],
        diff_min=1 if diff_sum is None or diff_sum >= 0 else -1,  # what a sum below 0 needs
        diff_max=1,
        diff_sum=rows if diff_sum is None else diff_sum,
        sorted=True,
    )


def make_run(*parts: Part) -> Run:
    return Run(parts)


class Shard:
    """`state` is what was committed last, `now_ms` the clock, by which leases are judged as well.
    `has_lease_clock`: as at a location of level 3. Only tests of the core need anything else of a shard."""

    def __init__(self, policy: Policy | None = None, schema: SchemaRecord = SCHEMA) -> None:
        self.policy = policy or Policy()
        self.now_ms = 0
        self.has_lease_clock = False
        self.is_stamped = False  # whether commits are stamped, as at a location of level 4
        self.is_checked = False  # whether the blob store agrees with the clock
        self.state = initial_state(NAME, schema, self.now_ms)
        self.indexed = NOTHING_INDEXED
        self.files: dict[str, TokenOutcome] = {}  # what is in files of outcomes, by id
        self._dead_parts: set[str] = set()

    def commit(self, *commands: Command) -> list[Result | PersistError]:
        """Apply the commands in order and commit them together; one that is refused gives its error."""
        results: list[Result | PersistError] = []
        state = self.state
        inserted_at: int | None = None
        for command in commands:
            try:
                following, result = step(state, command, self._context(inserted_at))
            except PersistError as error:
                results.append(error)
                continue
            results.append(result)
            if following is not state:
                is_insert = isinstance(command, Insert) and isinstance(result, Appended) and result.lower < result.upper
                inserted_at = result.lower.element if is_insert else None
            state = following
        self._commit(state)
        return results

    def one(self, command: Command) -> Result:
        """Commit one command alone; raises its error."""
        [result] = self.commit(command)
        if isinstance(result, PersistError):
            raise result
        return result

    def expire_lapsed(self) -> None:
        self._commit(expire_lapsed(self.state, self.now_ms, self._checked_ms))

    def _context(self, inserted_at: int | None) -> Context:
        clock = self.now_ms if self.has_lease_clock else None
        return Context(
            self.now_ms,
            self.policy,
            inserted_at,
            verdict=SOUND,
            lease_clock_ms=clock,
            indexed=self.indexed,
            remembered=self.files if self.state.files_of(OUTCOMES) else {},
            checked_ms=self._checked_ms,
            base_upper=self.state.upper,
        )

    @property
    def _checked_ms(self) -> int | None:
        return self.now_ms if self.is_checked else None

    def _commit(self, state: State) -> None:
        if state is self.state:
            return
        seqno, clock = SeqNo(self.state.seqno + 1), self.now_ms if self.has_lease_clock else 0
        made = {"seqno": seqno, "walltime_ms": self.now_ms, "commit_id": f"commit v{seqno}"}
        new = replace(state, lease_clock_ms=clock, **made)
        if self.is_stamped:
            before = self.state.upper if state.incarnation == self.state.incarnation else MINIMUM
            new = stamped(new, before, self._checked_ms, self.policy)
        new = departed(new, gone_between(self.state, new))
        self._check(self.state, new)
        self.state = new

    def _check(self, old: State, new: State) -> None:
        check_step(old, new)
        check_state(new)
        change = diff(old, new, new.commit_id)
        assert apply(change, old) == new
        assert decode_diff(encode_diff(change)) == change
        assert decode_state(encode_state(new)) == new
        assert set(change.gone) == set(old.blob_keys()) - set(new.blob_keys())
        now_alive = {part.id for part in new.trace.parts()}
        assert now_alive.isdisjoint(self._dead_parts), "a part that left the State came back"
        self._dead_parts |= {part.id for part in old.trace.parts()} - now_alive
