"""Runs one seed: chaos, heal, converge, check, and the check that the chaos did happen."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from unittest.mock import patch

import persist.client.lease_pool
import persist.client.pipelined
import persist.client.shard
import persist.client.write
import persist.commit.cached_state
import persist.commit.command_queue
import persist.commit.committer
import persist.commit.location
import persist.commit.location_identity
import persist.commit.part_validator
import persist.commit.state_loader
import persist.commit.validation_receipts
import persist.core.merge_plan
import persist.maintenance.collector
import persist.maintenance.journal_keeper
import persist.parts.part_files
import persist.parts.read_plan
import persist.parts.reader
import persist.sources.reclock
import tests.simulation.oracle
from consensus.memory_logs import VALUE_BYTES_MAX
from tests.simulation import sharing
from tests.simulation.actors import ROLES
from tests.simulation.chronicle import check_chronicle
from tests.simulation.cloning import CLONES_FROM
from tests.simulation.dating import DATED_SHARE, small_pages
from tests.simulation.erasing import ERASED_SHARE, check_erased
from tests.simulation.erasures import plain_parts
from tests.simulation.historians import HISTORIES
from tests.simulation.history import History
from tests.simulation.host import COPIES, MAIN, Host, Run
from tests.simulation.ingesting import INGESTED, LEFT_OUT, SHARES, check_ingested, ops_of
from tests.simulation.instants import CHECKED_OFF_MS_MAX
from tests.simulation.maintenance import (
    MAINTENANCE,
    MAINTENANCE_ROLES,
    ORPHAN_AGE_MS,
    settle,
    short_claims,
)
from tests.simulation.oracle import (
    REWRITES,
    ObservedBlob,
    ObservedConsensus,
    Oracle,
    Update,
    Violation,
    Write,
    expect,
    is_clone,
)
from tests.simulation.pipelining import check_piped
from tests.simulation.publishing import BEAT_S, KEEP_S, SETTINGS, check_recovered, is_published
from tests.simulation.restoring import RESTORED_SHARE
from tests.simulation.retaining import RETAINED_SHARE
from tests.simulation.scheduler import Task, cooperative
from tests.simulation.tagging import TAGGED_SHARE
from tests.simulation.verifying import check_verified
from tests.simulation.world import CLOCK_JUMP_MS_MAX, EPOCH_MS, FAULTS, WILD_CLOCK_MS_MAX, Process, World
from tests.simulation.writers import definite_rows

LOCKING = (
    persist.client.shard, persist.commit.cached_state, persist.commit.command_queue,
    persist.commit.location_identity, persist.commit.location, persist.commit.location_identity,
    persist.commit.validation_receipts, persist.parts.part_files, persist.parts.reader, persist.parts.read_plan,
    persist.client.lease_pool, persist.client.pipelined, persist.client.write, persist.sources.reclock,
)  # fmt: skip
PUTS_LOOKED_FOR = 300  # looks, of 10 ms each, for a process that has just put a blob
HIBERNATION_S = 3 * ORPHAN_AGE_MS / 1000
HOSTILE_SHARE = 0.4  # of the runs, in which a client lies about what it staged
CHRONICLE_SHARE = 0.25  # of the runs, in which a commit history is kept and checked
COMMIT_RETRY_S = 1.5
HELD_UP_SHARE = 0.3  # of the runs, in which servers hold requests up
HISTORY_SHARE = 0.5  # of the runs, whose shards keep history, which is asked for by wall clock
NARROW_SHARE = 0.15  # of the runs, whose consensus store takes little at once, so that state diffs go to blobs
NARROW_BYTES = 1_200
CHAOS_S = 1_000.0  # simulated; where nobody is left to do the operations
DECODED_MAX = 256  # entries of logs that are kept decoded
CONVERGE_S = 600.0  # simulated; far beyond every lease and retry
WRITERS = ("cas_writer", "cas_writer", "inserter", "inserter", "advancer", "replica", "replica")
OTHERS = ("accountant", "accountant", "pipeliner", "pipeliner", "evolver", "demolisher", "demolisher")
HISTORIANS = ("timekeeper", "configurator", "timekeeper", "configurator", "historian")
HISTORIANS_OPS = 30
PUBLISHERS = ("announcer", "copier")
READERS = ("snapshot_reader", "snapshot_reader", "listener", "listener", "holder", "forgetter", "forgetter")


@dataclass(frozen=True)
class Plan:
    """What a run is made of. All of it follows from the seed, and all of it can be cut down."""

    seed: int
    faults: tuple[str, ...]
    roles: tuple[tuple[str, ...], ...]  # of each process
    ops: int
    push: bool

    @classmethod
    def of(cls, seed: int) -> Plan:
        pick = random.Random(f"plan {seed}")
        if seed in INGESTED:
            usual = [fault for fault in FAULTS if fault not in (*LEFT_OUT, "drop_push")]
            faults = pick.sample(usual, pick.randrange(3, len(usual) + 1))
            return cls(seed, tuple(faults), SHARES, ops_of(seed), pick.random() < 0.5)
        usual = [fault for fault in FAULTS if fault not in ("flip", "truncate", "hibernate", "outage", "held_up")]
        faults = pick.sample(usual, pick.randrange(3, len(usual) + 1))
        if pick.random() < 0.15:
            faults += ["flip", "truncate"]
        if pick.random() < 0.1:
            faults += ["hibernate"]
        if pick.random() < 0.15:
            faults += ["outage"]
        if random.Random(f"held up {seed}").random() < HELD_UP_SHARE:
            faults += ["held_up"]
        push = pick.random() < 0.5
        if not push:
            faults = [fault for fault in faults if fault != "drop_push"]
        roles = [
            *pick.sample(WRITERS, 4),
            *pick.sample(OTHERS, pick.choice((0, 1, 1, 2))),
            *pick.sample(READERS, 3),
            "forgetter",
        ]
        roles += ["compactor", "collector", *pick.sample(MAINTENANCE, 1)]
        pick.shuffle(roles)
        processes = pick.choice((2, 3, 4))
        shares = tuple(tuple(roles[at::processes]) for at in range(processes))
        if random.Random(f"hostile {seed}").random() < HOSTILE_SHARE:
            shares = ((*shares[0], "hostile"), *shares[1:])
        ops = pick.randrange(30, 60)
        if kept_of(seed) is not None:
            ops += HISTORIANS_OPS
            shares = tuple((*share, *HISTORIANS[at :: len(shares)]) for at, share in enumerate(shares))
        if random.Random(f"chronicle {seed}").random() < CHRONICLE_SHARE:
            shares = tuple((*share, "chronicler") if at < 2 else share for at, share in enumerate(shares))
        if random.Random(f"tags {seed}").random() < TAGGED_SHARE:
            shares = (*shares[:-1], (*shares[-1], "tagger"))
        alone = not {"historian", "chronicler", "tagger"} & {role for share in shares for role in share}
        if alone:
            restored = random.Random(f"restores {seed}").random() < RESTORED_SHARE
            role = "restorer" if restored else "truncator"
            shares = tuple((*share, role) if at < 2 else share for at, share in enumerate(shares))
        roles_dealt = {role for share in shares for role in share}
        retained = random.Random(f"policies {seed}").random() < RETAINED_SHARE
        if retained and kept_of(seed) is not None and "chronicler" not in roles_dealt:
            shares = tuple((*share, "retainer") if at < 2 else share for at, share in enumerate(shares))
        if random.Random(f"erasures {seed}").random() < ERASED_SHARE:
            shares = tuple((*share, "eraser", "prover") if at < 2 else share for at, share in enumerate(shares))
        if kept_of(seed) is not None and random.Random(f"dates {seed}").random() < DATED_SHARE:
            shares = (*shares[:-1], (*shares[-1], "dater"))
        roles_dealt = {role for share in shares for role in share}
        if seed >= CLONES_FROM and kept_of(seed) is None and not {"eraser", "chronicler"} & roles_dealt:
            shares = tuple((*share, "cloner") if at < 2 else share for at, share in enumerate(shares))
        if seed >= CLONES_FROM and is_published(seed):
            shares = tuple((*share, "publisher", *PUBLISHERS[at : at + 1]) for at, share in enumerate(shares))
        return cls(seed, tuple(faults), shares, ops, push)

    def command(self) -> str:
        """The command that replays it."""
        whole = Plan.of(self.seed)
        words = [f"python -m tests.simulation {self.seed}"]
        if self.faults != whole.faults:
            words.append(f"--faults {','.join(self.faults) or 'none'}")
        if self.roles != whole.roles:
            words.append(f"--roles {'/'.join(','.join(share) for share in self.roles)}")
        if self.ops != whole.ops:
            words.append(f"--ops {self.ops}")
        return " ".join(words)


@dataclass
class Outcome:
    """How a run went. `violation` None: it kept every promise."""

    plan: Plan
    violation: Exception | None = None
    faults: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    log: list[str] = field(default_factory=list)

    @property
    def check(self) -> str:
        """The name of what failed."""
        if self.violation is None:
            return ""
        return self.violation.check if isinstance(self.violation, Violation) else type(self.violation).__name__

    @property
    def digest(self) -> str:
        """Equal for equal runs."""
        return hashlib.sha256("\n".join([*self.log, repr(self.violation)]).encode()).hexdigest()[:16]


def kept_of(seed: int) -> str | None:
    """How much history new shards of that run keep. None: they have no settings, as those that are older."""
    pick = random.Random(f"history {seed}")
    return pick.choice(HISTORIES) if pick.random() < HISTORY_SHARE else None


def run_plan(plan: Plan) -> Outcome:
    """Run to the end or to the first violation. A function of the plan alone."""
    world = World(plan.seed, plan.faults)
    oracle = Oracle()
    oracle.clock = lambda: EPOCH_MS + world.scheduler.now_us // 1000
    oracle.orphan_age_ms = ORPHAN_AGE_MS - CLOCK_JUMP_MS_MAX
    oracle.definite[COPIES] = lambda time: definite_rows(plan.seed, time)
    if plan.seed not in INGESTED:
        world.blobs = ObservedBlob(oracle, oracle.clock)
        narrow = random.Random(plan.seed ^ 0xD1FF).random() < NARROW_SHARE
        world.logs = ObservedConsensus(oracle, NARROW_BYTES if narrow else VALUE_BYTES_MAX)
    run = Run(world, oracle, History(), plan.ops, plan.seed, plan.push, plan.faults)
    run.kept = kept_of(plan.seed)
    run.roles = plan.roles
    if any("publisher" in share for share in plan.roles):
        run.publishes, oracle.keeps_states = SETTINGS, True
    outcome = Outcome(plan)
    with ExitStack() as stack:
        stack.enter_context(cooperative(world.scheduler, LOCKING))
        stack.callback(world.scheduler.end)
        if any("eraser" in share for share in plan.roles):
            stack.enter_context(plain_parts())
        stack.enter_context(small_pages())
        stack.enter_context(patch.object(persist.maintenance.collector, "DELETE_THREADS", 1))
        stack.enter_context(short_claims())
        stack.enter_context(patch.multiple(persist.core.merge_plan, WORKER_FEW_ROWS=64, INLINE_FLUSH_BYTES=1_500))
        stack.enter_context(patch.object(persist.client.lease_pool, "LOOK_S", sharing.LOOK_S))
        stack.enter_context(patch.object(persist.commit.committer, "RETRY_S", COMMIT_RETRY_S))
        stack.enter_context(patch.object(persist.commit.part_validator, "CHECK_THREADS", 1))
        stack.enter_context(patch.object(persist.maintenance.journal_keeper, "BEAT_S", BEAT_S))
        stack.enter_context(patch.object(persist.maintenance.journal_keeper, "KEEP_S", KEEP_S))
        stack.enter_context(patch.object(persist.client.lease_pool, "COMMITS_HELD_MAX", sharing.COMMITS_HELD_MAX))
        # Every process and the oracle read every entry of the log: the same bytes are decoded once.
        decode = lru_cache(DECODED_MAX)(persist.commit.state_loader.decode_diff)
        for module in (persist.commit.state_loader, tests.simulation.oracle):
            stack.enter_context(patch.object(module, "decode_diff", decode))
        try:
            _chaos(run, plan)
            _converge(run)
            _check(run, plan)
        except Exception as error:  # whatever stops a run is a finding
            failed = world.scheduler.failure
            outcome.violation = failed[1] if failed and isinstance(failed[1], Exception) else error
            if failed:
                oracle.note(f"{failed[0]} fails: {failed[1]!r}")
    outcome.faults, outcome.paths = world.fired(), oracle.paths
    outcome.steps, outcome.log = world.scheduler.steps, oracle.log
    return outcome


def _chaos(run: Run, plan: Plan) -> None:
    world = run.world
    maker = Host(run, world.process("maker"))
    for name in () if plan.seed in INGESTED else (MAIN, COPIES):
        task = world.start(maker.process, "make", lambda name=name: maker.open(name))
        world.scheduler.run(lambda task=task: not task.alive)
    for number, roles in enumerate(plan.roles):
        boot(run, world.process(f"p{number}"), roles)
    torment = world.start(Process("fate"), "torment", lambda: _torment(run, plan))
    world.scheduler.run(lambda: (run.stopping and not run.asleep) or world.scheduler.now_us > CHAOS_S * 1e6)
    run.stopping = True
    run.over = True
    world.scheduler.kill([torment])


def boot(run: Run, process: Process, roles: Sequence[str]) -> None:
    """Start a process and its actors."""
    host = Host(run, process)
    for number, role in enumerate(roles):
        work: Callable[[Host], None] = ROLES.get(role) or MAINTENANCE_ROLES[role]
        run.world.start(process, f"{role}{number}", lambda work=work: work(host))


def _torment(run: Run, plan: Plan) -> None:
    """Kills, freezes and confuses processes, now and then."""
    world, pick = run.world, run.world.random
    roles = dict(zip((f"p{n}" for n in range(len(plan.roles))), plan.roles, strict=True))
    fates = [fault for fault in plan.faults if fault in ("crash", "freeze", "hibernate", "outage")]
    fates += [fault for fault in plan.faults if fault in ("clock_jump", "wild_clock", "suspend")]
    while fates:
        world.scheduler.sleep(0.3 + 2 * pick.random())
        victims = [p for p in world.processes if p.name in roles and p.alive]
        fate = min(fates, key=lambda f: (world.counts[f] > 0, pick.random()))
        if not victims or not world.strikes(fate):
            continue
        victim = _about_to_name_a_blob(world, victims) if fate == "hibernate" else pick.choice(victims)
        if fate == "crash":
            run.oracle.note(f"{victim.name} is killed")
            world.crash(victim)
            world.start(Process("fate"), "reboot", lambda v=victim: _reboot(run, v, roles[v.name]))
        elif fate in ("freeze", "suspend", "hibernate"):
            run.oracle.note(f"{victim.name} falls asleep")
            world.freeze(victim, True)
            run.asleep += fate == "hibernate"
            seconds = HIBERNATION_S if fate == "hibernate" else 2 + 10 * pick.random()
            still = fate == "suspend"
            world.start(Process("fate"), "thaw", lambda v=victim, s=seconds, m=still: _thaw(run, v, s, m))
            if fate == "hibernate":
                fates.remove(fate)  # once: it takes as long as everything else together
        elif fate == "outage":
            run.oracle.note("the consensus store goes away")
            world.go_away()
        else:
            most = WILD_CLOCK_MS_MAX if fate == "wild_clock" else CLOCK_JUMP_MS_MAX
            victim.skew_ms = pick.randint(-most, most)
            if abs(victim.skew_ms) <= CHECKED_OFF_MS_MAX:
                run.oracle.clocks_off_ms = max(run.oracle.clocks_off_ms, abs(victim.skew_ms))
            run.oracle.note(f"the clock of {victim.name} is off by {victim.skew_ms} ms")


def _about_to_name_a_blob(world: World, victims: list[Process]) -> Process:
    """The process that has put a blob just now; any, where nobody puts one for some time."""
    world.last_put = None
    for _ in range(PUTS_LOOKED_FOR):
        world.scheduler.sleep(0.01)
        found = [victim for victim in victims if victim is world.last_put and victim.alive]
        if found:
            return found[0]
    return world.random.choice(victims)


def _reboot(run: Run, process: Process, roles: Sequence[str]) -> None:
    run.world.scheduler.sleep(5 * run.world.random.random())
    if not run.stopping:
        run.oracle.note(f"{process.name} starts again")
        boot(run, process, roles)


def _thaw(run: Run, process: Process, seconds: float, suspended: bool = False) -> None:
    """Wake the process up after so many seconds, which its monotonic clock has not counted if it was suspended."""
    run.world.scheduler.sleep(seconds)
    process.stood_still_us += int(seconds * 1e6) if suspended else 0
    run.oracle.note(f"{process.name} wakes up")
    run.world.freeze(process, False)
    if seconds > HIBERNATION_S / 2:
        run.world.scheduler.sleep(5.0)  # for what it had begun
        run.asleep -= 1


def _converge(run: Run) -> None:
    """No more faults; everybody comes to rest; what was begun is finished or lapses."""
    world = run.world
    run.oracle.note("heal")
    world.heal()
    for process in world.processes:
        world.freeze(process, False)
        process.skew_ms = 0
    deadline = world.scheduler.now_us + int(CONVERGE_S * 1e6)
    busy = [*world.processes, world.net]

    def at_rest() -> bool:
        if world.scheduler.now_us > deadline:
            stuck = [task for process in busy for task in process.tasks if task.alive]
            raise Violation("liveness", f"{stuck} do not come to rest in a healed world")
        return not any(task.alive for process in busy for task in process.tasks)

    world.scheduler.run(at_rest)
    judge = Host(run, world.process("judge"))
    checks = (check_verified, settle, check_verified, check_chronicle, check_erased, check_recovered)
    for check in (check_ingested,) if run.seed in INGESTED else checks:
        task = world.start(judge.process, check.__name__, partial(check, judge))
        world.scheduler.run(partial(_is_over, task))


def _is_over(task: Task) -> bool:
    return not task.alive


def _check(run: Run, plan: Plan) -> None:
    for write in run.history.writes:
        _check_write(run, write)
    clones = (t for t in (*run.oracle.shards.values(), *run.oracle.ended.values()) if is_clone(t.name))
    run.history.check({truth.life: truth.uppers[0][0] or 0 for truth in clones})
    for truth in (*run.oracle.shards.values(), *run.oracle.ended.values()):
        truth.instants.check()
    if run.seed not in INGESTED:
        check_piped(run)
    unfired = [fault for fault in plan.faults if not run.world.fired()[fault]]
    expect(not unfired, "vacuity", f"these faults never struck: {unfired}")


def _check_write(run: Run, write: Write) -> None:
    what = f"#{write.number} of {write.who} ({write.kind} [{write.lower}, {write.upper}))"
    if write.answer == "refused":
        # A try under way may still be remembered as one that found nothing left to truncate.
        is_idle = write.kind == "truncate" and write.landed is not None and write.landed[0] == write.landed[1]
        sentence = f"{what} was told that it failed, but it landed at {write.landed}"
        expect(write.landed is None or is_idle, "rejected", sentence)
    if write.answer != "ok" or write.kind == "advance":
        return
    if write.kind == "attributes":
        expect(write.landed is not None, "lost", f"{what} was acknowledged but never landed")
        return
    if write.kind == "append":
        upper = run.truth(write.shard).state.upper
        expect(not upper.less_equal(write.upper - 1), "lost", f"{what} was acknowledged, but the upper is {upper}")
        return
    if not write.landed and write.kind == "insert" and cancels(write.updates) and not write.attributes:
        return  # nothing was left to write, and so nothing was written
    if not write.landed and write.kind in REWRITES and write.told and write.told[0] == write.told[1]:
        return  # nothing differed
    expect(write.landed is not None, "lost", f"{what} was acknowledged but never landed")
    expect(write.landed == write.told, "answer", f"{what} landed at {write.landed} but was told {write.told}")


def cancels(updates: list[Update]) -> bool:
    total: Counter[tuple[str, int, int]] = Counter()
    for key, value, time, diff in updates:
        total[key, value, time] += diff
    return not any(total.values())


# --- when a run fails


def shrink(outcome: Outcome, tries_max: int = 60) -> Outcome:
    """A smaller plan that fails the same check: fewer faults, actors, operations."""
    best, tries = outcome, 0
    progress = True
    while progress and tries < tries_max:
        progress = False
        for plan in _smaller(best.plan):
            tries += 1
            candidate = run_plan(plan)
            if candidate.check == best.check:
                best, progress = candidate, True
                break
            if tries >= tries_max:
                break
    return best


def _smaller(plan: Plan) -> Iterator[Plan]:
    for ops in (plan.ops // 4, plan.ops // 2, plan.ops * 3 // 4):
        if 0 < ops < plan.ops:
            yield replace(plan, ops=ops)
    for at, share in enumerate(plan.roles):
        if share:
            yield replace(plan, roles=(*plan.roles[:at], (), *plan.roles[at + 1 :]))
    for at, share in enumerate(plan.roles):
        for role in range(len(share)):
            cut = (*share[:role], *share[role + 1 :])
            yield replace(plan, roles=(*plan.roles[:at], cut, *plan.roles[at + 1 :]))
    for at in range(len(plan.faults)):
        yield replace(plan, faults=(*plan.faults[:at], *plan.faults[at + 1 :]))


def report(outcome: Outcome, lines: int = 60) -> str:
    """What broke, the end of the history, and the command that replays it."""
    said = [f"seed {outcome.plan.seed} breaks a promise: {outcome.violation}", *outcome.log[-lines:]]
    return "\n".join([*said, f"replay: {outcome.plan.command()}"])
