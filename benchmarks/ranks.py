"""Random vectors of 2 to 16 data-parallel ranks over shipped and random plans: law 8, many times.

Every plan and its vectors are made from ``--seed`` and the plan's number alone. Each rank has a
dispatcher of its own, over a plan that was written and read again, and is asked other things between.
All must find the same answer; it must be what a scan over all entries finds (the second statement of
compatibility in tests/support/reference.py), leave no rank with less than its batch, follow a permutation
of the ranks, ignore idle ranks, and be eager for all where one rank has no graph. Exit code 1 on any
violation, each with the command that repeats it.

Also counted: in how many vectors ranks that dispatch their own batches would have gone apart, which
on a device is a hang or a wrong result.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator

import attrs
from _bench import CONSOLE, ROOT, conclude, parser, print_table, seeded, shipped_environments, shipped_specs

from capture_planner import codec
from capture_planner.analysis.data_parallel import Agreement, Submission, Vector, agree
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import CapturePlannerError
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning import planner
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.model import Method, Speculative
from capture_planner.records.plan import Plan, RolePlan
from capture_planner.records.spec import Limits, Lora, Spec

sys.path.insert(0, str(ROOT / "tests"))
from support import reference

MOST_RANKS = 16
LOCKED = sorted((ROOT / "plans" / "locked").glob("*.yaml"))


@attrs.define
class Outcome:
    """What became of the vectors of one plan."""

    number: int
    plan: str
    vectors: int = 0
    answers: int = 0
    counts: collections.Counter[str] = attrs.field(factory=collections.Counter)
    violations: list[str] = attrs.field(factory=list)


# Plans -----------------------------------------------------------------------------------------


def plan_of(number: int, seed: int) -> tuple[str, Plan]:
    """Return a shipped plan, or after those a random one."""
    if number < len(LOCKED):
        return LOCKED[number].stem, codec.load_plan(LOCKED[number])
    rng = random.Random(f"plan:{seed}:{number}")
    specs, environments = shipped_specs(), shipped_environments()
    while True:
        name = rng.choice(sorted(specs))
        environment = environments[rng.choice(sorted(environments))]
        try:
            plan = planner.plan(changed(specs[name], rng), environment, registry.load_backends())
        except CapturePlannerError:
            continue
        if not any(decodes_of(plan, role.role) for role in plan.roles):
            continue  # so few tokens that no decode fits
        if rng.random() < 0.5:
            plan = replace(plan, roles=tuple(scattered(role, plan, rng) for role in plan.roles))
            name += ", entries scattered"
        return f"random, from {name}", plan


def changed(spec: Spec, rng: random.Random) -> Spec:
    """Return a spec with other limits, speculation, adapters and mode."""
    reqs = rng.choice((1, 2, 7, 16, 33, 64, 256))
    speculative = None
    if rng.random() < 0.75:
        most = rng.choice((1, 2, 3, 5, 7))
        schedule: tuple[tuple[int, int, int], ...] = ()
        if reqs > 3 and rng.random() < 0.7:
            first, second = sorted(rng.sample(range(1, reqs), 2))
            ks = [rng.randint(0, most) for _ in range(3)]
            schedule = ((1, first, ks[0]), (first + 1, second, ks[1]), (second + 1, reqs, ks[2]))
        speculative = Speculative(method=rng.choice((Method.EAGLE, Method.EAGLE3)), num_tokens=most, schedule=schedule)
    lora = Lora(max_active=rng.choice((1, 4, 9)), specialize=rng.random() < 0.7)
    return replace(
        spec,
        limits=Limits(max_num_reqs=reqs, max_num_tokens=reqs * rng.choice((1, 4, 8)) + rng.choice((0, 1, 512))),
        speculative=speculative,
        lora=lora if rng.random() < 0.5 else None,
        mode=rng.choice((*GraphMode, GraphMode.FULL, *[GraphMode.FULL_AND_PIECEWISE] * 5)),
    )


def scattered(role: RolePlan, plan: Plan, rng: random.Random) -> RolePlan:
    """Return the role with some entries gone, and some that no planner makes."""
    entries = [entry for entry in role.entries if rng.random() < 0.5]
    for _ in range(rng.randint(0, 8)):
        tokens, reqs = rng.randint(1, plan.limits.max_num_tokens), rng.randint(1, plan.limits.max_num_reqs)
        length = rng.choice((None, 1, 2, 3, 4))
        entries.append(
            Entry(
                mode=rng.choice((GraphMode.FULL, GraphMode.PIECEWISE)),
                num_tokens=tokens if length is None else reqs * length,
                num_reqs=rng.choice((None, reqs)) if length is None else reqs,
                query_len=length,
                active_loras=0 if plan.lora is None else rng.randint(0, plan.lora.max_active + 1),
                draft_steps=rng.choice((None, None, 1, 2, 3)),
            )
        )
    return replace(role, entries=tuple(entries))


# Vectors ---------------------------------------------------------------------------------------


def drafts_of(plan: Plan, num_reqs: int) -> int:
    """Return the draft tokens of a batch size."""
    return 0 if plan.speculative is None else reference.scheduled_k(plan, num_reqs)


def decodes_of(plan: Plan, role: Role) -> list[tuple[int, int, int]]:
    """Return first and last requests of each range of decodes, with their length; none that never run."""
    limits, vectors = plan.limits, []
    starts = [first for first, *_ in plan.speculative.ranges] if plan.speculative is not None else []
    starts = [first for first in starts if first <= limits.max_num_reqs] or [1]
    for first, after in itertools.pairwise([*starts, limits.max_num_reqs + 1]):
        k = drafts_of(plan, first)
        each = 1 if role is Role.DRAFT_DECODE else 1 + k
        last = min(after - 1, limits.max_num_tokens // each)
        if first <= last and (role is not Role.DRAFT_DECODE or k >= 2):
            vectors.append((first, last, each))
    return vectors


def batch_of(plan: Plan, role: Role, decode: bool, rng: random.Random) -> Batch:
    """Return a decode of its own scheduled length, or a mixed batch."""
    limits = plan.limits
    first, last, each = rng.choice(decodes_of(plan, role))
    reqs = rng.choice((first, last, rng.randint(first, last)))
    loras = 0
    if plan.lora is not None and rng.random() < 0.5:
        loras = rng.randint(0, min(plan.lora.max_active + 1, reqs))
    if decode or role is Role.DRAFT_DECODE:
        # A prompt of exactly this length now and then: it has a decode's shape and is none.
        past = role is Role.DRAFT_DECODE or rng.random() < 0.98
        return Batch(
            role=role, num_reqs=reqs, num_tokens=reqs * each, query_len=each, past_prompt=past, active_loras=loras
        )
    tokens = rng.randint(reqs, max(reqs, limits.max_num_tokens))
    return Batch(role=role, num_reqs=reqs, num_tokens=tokens, past_prompt=False, active_loras=loras)


def vector_of(plan: Plan, rng: random.Random) -> Vector:
    """Return a vector of one role: mostly decodes, with idle, mixed and poorer ranks among them."""
    role = rng.choice([role for role in plan.roles if decodes_of(plan, role.role)])
    idle, mixed = rng.choice((0, 0, 0.3, 0.9)), rng.choice((0, 0, 0.1, 1))
    alike = rng.random() < 0.3
    same = batch_of(plan, role.role, rng.random() >= mixed, rng)
    without, poorer = rng.random() < 0.05, rng.random() < 0.15
    ranks = []
    for _ in range(rng.randint(2, MOST_RANKS)):
        batch = same if alike else batch_of(plan, role.role, rng.random() >= mixed, rng)
        missing = rng.sample(role.entries, min(len(role.entries), rng.randint(1, 4)))
        ranks.append(
            Submission(
                batch=None if rng.random() < idle else batch,
                captured=not (without and rng.random() < 0.3),
                missing=frozenset(missing) if poorer and rng.random() < 0.5 else frozenset(),
            )
        )
    return Vector(role=role.role, ranks=tuple(ranks))


# Checks ----------------------------------------------------------------------------------------


def expected(plan: Plan, vector: Vector) -> tuple[Entry | None, Entry | None]:
    """Return the cheapest entry that serves every rank: of those that all have, and of all."""
    batches = [reference.without_adapters(s.batch) for s in vector.ranks if s.batch is not None]
    chain = reference.chain_length(plan, vector.role, max(batch.num_reqs for batch in batches))
    entries = plan.role(vector.role).entries
    able = [e for e in entries if all(reference.serves(e, batch, chain) for batch in batches)]
    missing = {entry for submitted in vector.ranks for entry in submitted.missing}
    usable = [e for e in able if e not in missing] if all(s.captured for s in vector.ranks) else []
    return min(usable, key=lambda e: e.cost, default=None), min(able, key=lambda e: e.cost, default=None)


def wrong(
    plan: Plan, vector: Vector, agreements: list[Agreement], own: Dispatcher, rng: random.Random
) -> Iterator[str]:
    """Yield every law that the ranks' answers break."""
    agreement = agreements[0]
    if any(other != agreement for other in agreements[1:]):
        yield "ranks found different answers"
    dispatches = [answer.dispatch for answer in agreement.answers]
    if len({(d.entry, d.reason) for d in dispatches}) != 1 or (agreement.entry is None) == (agreement.reason is None):
        yield "not one entry, or one reason, for all"
    working = [submitted for submitted in vector.ranks if submitted.batch is not None]
    if not working:
        if agreement.reason is not Reason.IDLE or any(answer.batch for answer in agreement.answers):
            yield "idle ranks alone run something"
        return
    best, own_best = expected(plan, vector)
    if agreement.entry != best:
        yield f"took {agreement.entry}, a scan finds {best}"
    if (agreement.reason is Reason.RANK) != (best is None and own_best is not None):
        yield f"reason {agreement.reason} where the ranks lack {own_best}"
    if any(not submitted.captured for submitted in vector.ranks) and agreement.entry is not None:
        yield "a rank has no graphs, and others replay"
    for submitted, answer in zip(vector.ranks, agreement.answers, strict=True):
        entry, batch = answer.dispatch.entry, answer.batch
        if batch is None or (submitted.batch is not None and batch != submitted.batch):
            yield "a rank runs another batch than its own"
        elif entry is not None:
            tokens, reqs = (entry.num_tokens - batch.num_tokens, (entry.num_reqs or batch.num_reqs) - batch.num_reqs)
            if min(tokens, reqs) < 0 or (tokens, reqs) != (answer.dispatch.padded_tokens, answer.dispatch.padded_reqs):
                yield "padding is not what the entry has beyond the batch"
    order = rng.sample(range(len(vector.ranks)), len(vector.ranks))
    permuted = agree(own, attrs.evolve(vector, ranks=tuple(vector.ranks[rank] for rank in order)))
    if permuted.answers != tuple(agreement.answers[rank] for rank in order):
        yield "a permutation of the ranks changes answers"
    able = tuple(s for s in vector.ranks if s.batch is not None or poor(s))
    if len(able) < len(vector.ranks):
        fewer = agree(own, attrs.evolve(vector, ranks=able))
        if (fewer.entry, fewer.reason, fewer.joint) != (agreement.entry, agreement.reason, agreement.joint):
            yield "idle ranks change what the others run"


def poor(submitted: Submission) -> bool:
    """Say whether a rank lacks any graph."""
    return not submitted.captured or bool(submitted.missing)


def apart(own: Dispatcher, vector: Vector) -> bool:
    """Say whether ranks that dispatch their own batches, with what they captured, would go apart."""
    answers = set()
    for submitted in vector.ranks:
        if submitted.batch is not None:
            entry = own.dispatch(submitted.batch).entry
            answers.add(None if entry is None or submitted.lacks(entry) else entry)
    return len(answers) > 1


def check(task: tuple[int, int, int]) -> Outcome:
    """Run all vectors of one plan."""
    number, vectors, seed = task
    name, plan = plan_of(number, seed)
    outcome = Outcome(number=number, plan=name)
    rng = random.Random(f"vectors:{seed}:{number}")
    text = codec.dumps(plan)
    # Reading takes a thousand times as long as a step: ranks share five copies, and no dispatcher.
    copies = [codec.loads(text, Plan) for _ in range(4)] + [plan]
    ranks = [Dispatcher(copies[rank % len(copies)]) for rank in range(MOST_RANKS)]
    scanned = Dispatcher(plan)
    for index in range(vectors):
        vector = vector_of(plan, rng)
        agreements = []
        for rank in rng.sample(range(len(vector.ranks)), len(vector.ranks)):
            if rng.random() < 0.3:
                agree(ranks[rank], vector_of(plan, rng))
            agreements.append(agree(ranks[rank], vector))
        broken = list(wrong(plan, vector, agreements, scanned, rng))
        if broken:
            outcome.violations.append(f"vector {index}: {'; '.join(broken)}")
        agreement = agreements[0]
        outcome.vectors += 1
        outcome.answers += len(agreements)
        mode = agreement.answers[0].dispatch.mode.value
        outcome.counts[mode if agreement.reason is None else f"{mode}: {agreement.reason}"] += 1
        outcome.counts[f"role {vector.role}"] += 1
        idle = sum(submitted.batch is None for submitted in vector.ranks)
        outcome.counts["with idle ranks"] += 0 < idle < len(vector.ranks)
        outcome.counts["with ranks that lack graphs"] += any(poor(s) for s in vector.ranks)
        outcome.counts["with LoRA"] += any(s.batch is not None and s.batch.active_loras for s in vector.ranks)
        ks = {drafts_of(plan, s.batch.num_reqs) for s in vector.ranks if s.batch is not None}
        outcome.counts["with ranks whose own K differs"] += len(ks) > 1
        outcome.counts["apart, if each rank dispatched alone"] += apart(scanned, vector)
        outcome.counts["took the next entry, one being lost"] += (
            agreement.lost_entry is not None and agreement.entry is not None
        )
    return outcome


def main() -> int:
    """Run the campaign; return the exit code."""
    options = parser(__doc__)
    options.add_argument("--vectors", "-n", type=int, default=2000, help="how many in all (default 2,000)")
    options.add_argument("--plans", type=int, default=100, help="over so many plans (default 100)")
    options.add_argument("--only", type=int, default=None, metavar="NUMBER", help="the vectors of one plan")
    arguments = seeded(options)
    each = -(-arguments.vectors // arguments.plans)
    numbers = range(arguments.plans) if arguments.only is None else [arguments.only]
    tasks = [(number, each, arguments.seed) for number in numbers]
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(min(arguments.jobs, len(tasks))) as pool:
        outcomes = list(pool.imap_unordered(check, tasks))
    return _report(arguments, sorted(outcomes, key=lambda outcome: outcome.number), each, time.perf_counter() - started)


def _report(arguments: argparse.Namespace, outcomes: list[Outcome], each: int, wall: float) -> int:
    counts: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        counts.update(outcome.counts)
    vectors, answers = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("vectors", "answers"))
    rows = ((kind, count, f"{count / vectors:.1%}") for kind, count in counts.most_common())
    print_table(f"{vectors} vectors, {answers} answers of single ranks", ("vectors", "number", "share"), rows)
    bad = [(outcome, kind) for outcome in outcomes for kind in outcome.violations]
    for outcome, kind in bad[:20]:
        again = f"python benchmarks/ranks.py --seed {arguments.seed} --vectors {arguments.vectors}"
        again += f" --plans {arguments.plans} --only {outcome.number}"
        CONSOLE.print(f"{outcome.plan}: {kind}\n    {again}", markup=False, highlight=False)
    CONSOLE.print(f"{vectors} vectors in {wall:.0f} s, seed {arguments.seed}")
    results = {
        "seed": arguments.seed,
        "plans": {"shipped": sum(outcome.number < len(LOCKED) for outcome in outcomes), "all": len(outcomes)},
        "vectors": vectors,
        "vectors_a_plan": each,
        "answers": answers,
        "wall_seconds": round(wall, 1),
        "jobs": arguments.jobs,
        "counts": dict(counts.most_common()),
        "violations": [{"plan": outcome.number, "what": kind} for outcome, kind in bad],
    }
    return conclude(arguments, results, {f"no violation (found {len(bad)})": not bad})


if __name__ == "__main__":
    sys.exit(main())
