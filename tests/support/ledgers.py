"""Strategies for the reports of runs: of any plan, of any length, also of runs that were stopped."""

import functools
from pathlib import Path
from typing import Any

import attrs
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.fingerprint import Fingerprint
from capture_planner.records.plan import Waiver
from capture_planner.records.spec import CapturePolicy, CaptureTiming
from capture_planner.testing import arbitrary_plans, batches, plans
from capture_planner_runner.graphs.reading import Reading
from capture_planner_runner.ledger.rows import CacheMemory, Forward, GraphCapture, RequestResult, Step, Wait, WarmUp
from capture_planner_runner.ledger.session import RunReport
from capture_planner_runner.numerics.record import Comparison, Difference, FieldSnapshot, LargestError

LOCKED = {path.stem: path for path in sorted((Path(__file__).parents[2] / "plans" / "locked").glob("*.yaml"))}
HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "[/bold]", "$\\frac{1}{0}$", "\udc80")

names = st.sampled_from(HOSTILE) | st.text(min_size=1, max_size=12)
# A clock ticks in nanoseconds.
times = st.sampled_from((0.0, 1e-9, 0.5)) | st.floats(1e-9, 1e4)
counts = st.sampled_from((0, 1)) | st.integers(0, 1 << 40)


@functools.cache
def locked_plan(name):
    """Return a locked plan, which is read once."""
    return codec.load_plan(LOCKED[name])


@st.composite
def readings(draw):
    """A device at one moment: what is gone is what the allocator holds and more."""
    mine = draw(st.integers(0, 1 << 36))
    return Reading(used=mine + draw(st.integers(0, 1 << 30)), held=mine)


def lazy(plan):
    """The plan with every second graph of a role on first use."""
    capture = CaptureTiming(policy=CapturePolicy.LAZY, memory=1 << 30, seconds_per_minute=1.0)
    return replace(plan, capture=capture, roles=tuple(replace(role, lazy=role.entries[::2]) for role in plan.roles))


@st.composite
def captures(draw, plan):
    """What was captured of a plan: a part of it, in capture order, some graphs dropped, then lazy ones on first use."""
    planned = [(role.role, entry) for role in plan.roles for entry in role.at_start]
    at_start = len(planned)
    planned += [(role.role, entry) for role in plan.roles for entry in role.entries if entry in role.lazy]
    reasons = st.none() | st.none() | st.sampled_from((Reason.MEMORY, Reason.BUDGET))
    # A few draws for all graphs in turn: a plan may have more than a hundred.
    kinds = draw(st.lists(st.tuples(times, counts, counts, reasons, names), min_size=1, max_size=3))
    # One device for all graphs, or none; a few moments of it in turn. At a stride of 2 each capture
    # begins where the one before ended, and the ledger explains all.
    moments = draw(st.none() | st.lists(readings(), min_size=1, max_size=4))
    stride = draw(st.sampled_from((2, 3)))
    read = draw(st.none() | st.dictionaries(st.sampled_from("abc"), st.integers(1, 9)))
    found = []
    for index, (role, entry) in enumerate(planned[: draw(st.just(len(planned)) | st.integers(0, len(planned)))]):
        taken, memory, alone, reason, says = kinds[index % len(kinds)]
        waiver = None
        if reason is not None:
            waiver = Waiver(kind=Kind.MIXED, first=1, last=entry.num_tokens, reason=reason, message=says)
        seen = None
        if moments:
            seen = tuple(moments[(stride * index + step) % len(moments)] for step in range(3))
        capture = GraphCapture(
            role=role,
            entry=entry,
            seconds=taken,
            memory=memory,
            alone=alone,
            readings=seen,
            waiver=waiver,
            step=None if index < at_start else index,
        )
        if read is not None:
            made_of = Fingerprint(nodes=1000 * index, kernels=read, topology=f"{index:016x}")
            capture = attrs.evolve(capture, fingerprint=made_of)
        found.append(capture)
    return tuple(found)


@st.composite
def fits(draw, role, entry):
    """A batch that an entry can serve, with little padding."""
    num_reqs = num_tokens = max(1, entry.num_tokens - draw(st.integers(0, 3)))
    query_len = None
    if entry.query_len is not None:
        query_len, num_reqs = entry.query_len, max(1, (entry.num_reqs or 1) - draw(st.integers(0, 3)))
        num_tokens = num_reqs * query_len
    elif entry.num_reqs is None or entry.num_reqs < num_reqs:
        num_reqs = draw(st.integers(1, entry.num_reqs or num_reqs))
    return Batch(role=role, num_reqs=num_reqs, num_tokens=num_tokens, query_len=query_len)


@st.composite
def forwards(draw, dispatcher, captured, step):
    """One forward, served by what was captured, as the dispatcher answers for the whole plan."""
    fitting = [fits(role, entry) for role, entry in captured]
    anything = batches(dispatcher.plan).filter(lambda batch: min(batch.num_reqs, batch.num_tokens) >= 0)
    batch = draw(draw(st.sampled_from(fitting)) if fitting and draw(st.integers(0, 3)) else anything)
    answer = dispatcher.dispatch(batch)
    there = (batch.role, answer.entry) in captured
    return Forward(
        step=step,
        role=batch.role,
        num_reqs=batch.num_reqs,
        num_tokens=batch.num_tokens,
        query_len=batch.uniform_query_len,
        max_query_len=batch.max_query_len if batch.query_len is None and batch.past_prompt else None,
        entry=answer.entry if there else None,
        reason=None if there else answer.reason or Reason.MEMORY,
        padded_tokens=answer.padded_tokens if there else 0,
        padded_reqs=answer.padded_reqs if there else 0,
        repeats=draw(st.sampled_from((1, 1, 2, 7))),
        host_seconds=draw(times),
        seconds=draw(times),
    )


@st.composite
def steps(draw, index):
    """One step of any load."""
    num_reqs = draw(st.integers(0, 300))
    # Of each place there are no more drafts than of the one before, and no more accepted than drafted.
    pairs = draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)).map(sorted), max_size=3))
    columns = zip(*pairs, strict=True) if pairs else ((), ())
    accepted_at, drafted_at = (tuple(sorted(column, reverse=True)) for column in columns)
    return Step(
        index=index,
        num_reqs=num_reqs,
        num_tokens=num_reqs + draw(st.integers(0, 5000)),
        prompts=draw(st.integers(0, num_reqs)),
        drafted=sum(drafted_at),
        accepted=sum(accepted_at),
        drafted_at=drafted_at,
        accepted_at=accepted_at,
        seconds=draw(times),
        waiting=draw(st.integers(0, 9)),
    )


@st.composite
def served(draw):
    """One request: finished, cut off, or never begun."""
    tokens = draw(st.lists(st.integers(0, 1 << 17), max_size=4))
    first: Any = draw(times) if tokens else None
    return RequestResult(
        name=draw(names),
        prompt_tokens=draw(st.integers(1, 100)),
        output_tokens=len(tokens),
        first_token=first,
        finished=draw(st.none() | times.map(lambda more: first + more)) if tokens else None,
        tokens=tuple(tokens),
        text=draw(st.none() | names),
        waited_for=draw(st.none() | st.sampled_from(Wait)),
    )


@st.composite
def warm_ups(draw):
    """What ran before the clock started."""
    shapes = draw(counts)
    return WarmUp(
        shapes=shapes,
        ran=draw(st.integers(0, shapes)),
        seconds=draw(times),
        compiled=tuple(draw(st.lists(times, max_size=3))),
        reason=draw(st.just("") | names),
    )


@st.composite
def cache_memories(draw):
    """How large the KV cache was made, and why."""
    return CacheMemory(share=draw(st.none() | st.just(0.9)), predicted=draw(counts), reason=draw(names))


@st.composite
def differences(draw):
    """Anything that a graph can have wrong, with any names."""
    tables = st.lists(st.lists(st.integers(-(1 << 63), 1 << 31), max_size=9), max_size=9)
    maybe = st.none() | st.integers(0, 1 << 20)
    numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers()
    mode = draw(st.sampled_from((GraphMode.FULL, GraphMode.PIECEWISE)))
    seen = FieldSnapshot(name=draw(names), real=draw(tables | maybe), padding=draw(st.none() | tables))
    return Difference(
        step=draw(counts),
        role=draw(st.sampled_from(Role)),
        entry=Entry(mode=mode, num_tokens=draw(st.integers(1, 99))),
        draft_step=draw(maybe),
        layer=draw(maybe),
        tensor=draw(names),
        row=draw(counts),
        request=draw(st.none() | names),
        token=draw(maybe),
        graph=draw(numbers),
        eager=draw(numbers),
        error=draw(st.none() | times),
        tolerance=draw(st.sampled_from((0.0, 1e-9))),
        rows=draw(counts),
        after=draw(st.none() | names),
        num_tokens=draw(counts),
        num_reqs=draw(counts),
        padded_tokens=draw(counts),
        padded_reqs=draw(counts),
        requests=tuple(draw(st.lists(names, max_size=20))),
        fields=(seen,) * draw(st.integers(0, 2)),
    )


@st.composite
def comparisons(draw):
    """What was compared: nothing, something, up to a difference or to the end."""
    compared, eager = (draw(st.dictionaries(st.sampled_from(Role), counts, max_size=3)) for _ in range(2))
    largest = [
        LargestError(
            tensor=draw(names),
            error=draw(st.just(0.0) | times),
            tolerance=0.05,
            role=draw(st.sampled_from(Role)),
            layer=draw(st.none() | st.integers(0, 99)),
        )
        for _ in range(draw(st.integers(0, 2)))
    ]
    return Comparison(
        compared=compared,
        eager=eager,
        steps=draw(counts),
        largest=tuple(largest),
        near_ties=draw(counts),
        difference=draw(st.none() | differences()),
    )


@attrs.frozen(kw_only=True, repr=False)
class PrintableReport(RunReport):
    """A report that a failing test can print: Hypothesis warns of one with its whole plan."""

    def __repr__(self):
        shown = ("model", "host", "forwards", "steps", "served", "serve_seconds", "interrupted")
        return f"<{', '.join(f'{name}={getattr(self, name)!r}' for name in shown)}>"


@st.composite
def reports(draw):
    """Any report, the degenerate ones included: no capture, no step, no request, no drafter."""
    locked = locked_plan(draw(st.sampled_from(sorted(LOCKED))))
    # Drawing a plan takes longer than all the rest; the locked ones are of every kind but strange.
    plan = locked if draw(st.integers(0, 4)) else draw(plans(max_reqs=64) | arbitrary_plans())
    plan = lazy(plan) if draw(st.booleans()) else plan
    captured, dispatcher = draw(captures(plan)), Dispatcher(plan)
    usable = [(graph.role, graph.entry) for graph in captured if graph.waiver is None]
    first, length = draw(st.sampled_from((0, 0, 1000))), draw(st.sampled_from((0, 1, 2, 3)))
    numbers = range(first, first + length)
    asked = [number for number in numbers for _ in range(draw(st.integers(0, 4)))] if plan.roles else []
    # The last step may have been cut off: its forwards are there, and it is not.
    ended = numbers[: draw(st.sampled_from((length, max(0, length - 1))))]
    return PrintableReport(
        plan=plan,
        model=draw(names),
        backends=draw(st.dictionaries(names, names, max_size=2)),
        host=draw(st.dictionaries(names, names, max_size=3)),
        captured=captured,
        forwards=tuple(draw(forwards(dispatcher, usable, number)) for number in asked),
        steps=tuple(draw(steps(number)) for number in ended),
        served=tuple(draw(st.lists(served(), max_size=4))),
        buffers=draw(counts),
        kv_cache=draw(counts),
        capture_seconds=draw(times),
        serve_seconds=draw(times),
        interrupted=draw(st.booleans()),
        workspaces=draw(counts),
        weights=draw(counts),
        served_reading=draw(st.none() | readings()),
        comparison=draw(st.none() | comparisons()),
        acceptance=draw(st.sampled_from(((), (0.5, 0.25, 0.0)))),
        mismatched_requests=draw(st.sampled_from((0, 3))),
        cache_memory=draw(st.none() | cache_memories()),
        warm_up=draw(st.none() | warm_ups()),
        compiled=tuple(draw(st.lists(times, max_size=2))),
    )
