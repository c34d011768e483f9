"""Steps of a traffic: each line is the batch that its numbers fit, by a list of all decodes that the deployment has."""

from __future__ import annotations

from collections import Counter
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.modes import Role
from capture_planner.planning.measured.steps import Steps, passes_of, steps_of
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import decode_families, extra_slots, most_loras, query_len_of
from capture_planner.records.spec import Spec
from capture_planner.records.traffic import Traffic, TrafficCount
from capture_planner.testing import specs

OTHERS = [(1, 9, 0), (2, 6, 3), (3, 3, 1), (2, 10, 5), (5, 17, 0), (30, 90, 3)]
SPECS = specs(max_reqs=24, max_tokens=96, measured=None)


def decodes(spec: Spec) -> list[tuple[int, int, int]]:
    """Return requests, tokens and query length of each decode of the target, in the order of the families."""
    return [
        (number, number * family.query_len, family.query_len)
        for family in decode_families(Role.TARGET, spec)
        for number in range(1, spec.limits.max_num_reqs + 1)
        if number in family.requests
    ]


@st.composite
def lines(draw: st.DrawFn, spec: Spec) -> TrafficCount:
    """Draw the target's lines that say all, or less, of a decode of the deployment or of any other batch."""
    number, tokens, each = draw(st.sampled_from(decodes(spec) or OTHERS) | st.sampled_from(OTHERS))
    num_reqs, query_len = draw(st.sampled_from((number, None))), draw(st.sampled_from((each or None, None)))
    unknown = num_reqs is not None and query_len is None and draw(st.booleans())
    return TrafficCount(
        role=draw(st.sampled_from((Role.TARGET, Role.TARGET, Role.TARGET, Role.DRAFT_DECODE))),
        num_reqs=num_reqs,
        num_tokens=None if unknown else tokens,
        query_len=query_len,
        past_prompt=draw(st.sampled_from((True, None, False))),
        active_loras=draw(st.integers(0, 4)),
        count=draw(st.integers(1, 2000)),
    )


@st.composite
def traffics(draw: st.DrawFn) -> tuple[Spec, Traffic]:
    spec = draw(SPECS)
    listed = draw(st.lists(lines(spec), max_size=6, unique_by=lambda line: line.shape))
    return spec, Traffic(sources=("drawn",), batches=tuple(listed))


def batch_of(line: TrafficCount, spec: Spec, typical: int) -> Batch | None:
    """Return the first decode that a line fits, else a batch with its tokens; None without requests and tokens."""
    given_of = line.num_reqs, line.num_tokens, line.query_len
    for shape in decodes(spec):
        fits = all(one in (None, other) for one, other in zip(given_of, shape, strict=True))
        if fits and line.past_prompt is not False:
            return Batch.decode(Role.TARGET, shape[0], shape[2])
    if line.num_tokens is None:
        return None
    whole = line.num_reqs is not None and line.query_len is not None
    return Batch(
        role=Role.TARGET,
        num_reqs=min(line.num_reqs or typical, line.num_tokens),
        num_tokens=line.num_tokens,
        query_len=line.query_len if whole else None,
        past_prompt=line.past_prompt is True,
    )


def said(notes: tuple[str, ...], words: str) -> int:
    """Return how many steps the notes that end in some words are about."""
    return sum(int(note.split()[0].replace(",", "")) for note in notes if note.endswith(words))


@settings(max_examples=max(settings.default.max_examples, 40))
@given(traffics())
def test_each_line_is_the_batch_that_its_numbers_fit(drawn: tuple[Spec, Traffic]) -> None:
    """Decodes first, then what is known; within the limits, with no more adapters than its requests and the limit."""
    spec, traffic = drawn
    listed = [line for line in traffic.batches if line.role is Role.TARGET]
    known = [line.num_reqs for line in listed for _ in range(line.count) if line.num_reqs is not None]
    typical = max(sum(known) // len(known), 1) if known else spec.limits.max_num_reqs
    expected: Counter[Batch] = Counter()
    absent = beyond = unknown = phase = 0
    foreign: Counter[int] = Counter()
    for line in listed:
        batch = batch_of(line, spec, typical)
        if batch is None:
            absent += line.count
            continue
        rows = batch.num_tokens + batch.num_reqs * extra_slots(spec)
        if rows > spec.limits.max_num_tokens or batch.num_reqs > spec.limits.max_num_reqs:
            beyond += line.count
            continue
        loras = min(line.active_loras, most_loras(Role.TARGET, spec), batch.num_reqs)
        own = (batch.num_reqs, batch.num_tokens, batch.query_len) in decodes(spec)
        expected[Batch(**{name: getattr(batch, name) for name in _FIELDS}, active_loras=loras)] += line.count
        foreign[line.query_len or 0] += line.count * (
            line.past_prompt is not False and bool(line.query_len) and not own
        )
        unknown += line.count * (line.num_reqs is None)
        phase += line.count * (line.num_reqs is not None and line.past_prompt is None and bool(batch.query_len))
    steps = steps_of(traffic, spec)
    assert steps.counts == +expected
    assert steps.total == expected.total()
    order = [(b.num_tokens, b.num_reqs, b.query_len or 0, b.past_prompt, b.active_loras) for b in steps.counts]
    assert order == sorted(order)
    assert said(steps.notes, "without tokens or requests are left out") == absent
    assert said(steps.notes, "beyond the limits are left out") == beyond
    assert sum(said((note,), "") for note in steps.notes if "of unknown requests are taken for" in note) == unknown
    assert said(steps.notes, "have the shape of decodes and are taken for them") == phase
    assert said(steps.assumptions, "") == (+foreign).total()
    for note in steps.notes:
        assert "mixed batches of" not in note or f"mixed batches of {typical} requests" in note
    for sentence in steps.assumptions:
        recorded = " or ".join(map(str, sorted(+foreign)))
        own_lengths = " or ".join(map(str, sorted({each for *_, each in decodes(spec)})))
        assert f"of query length {recorded}; this deployment has those of {own_lengths}:" in sentence


_FIELDS = ("role", "num_reqs", "num_tokens", "query_len", "past_prompt")


@settings(max_examples=max(settings.default.max_examples, 40))
@given(st.dictionaries(st.integers(1, 30), st.integers(1, 40), min_size=1), st.sampled_from((0, 1, 50, 90, 99.5, 100)))
def test_a_percentile_is_that_step_of_all_in_order(counts: dict[int, int], percent: float) -> None:
    steps = Steps({Batch.decode(Role.TARGET, number, 1): count for number, count in counts.items()})
    every = sorted(-number for number, count in counts.items() for _ in range(count))
    place = max(ceil(len(every) * percent / 100 - 1e-9), 1)
    assert -steps.percentile(percent, lambda batch: -batch.num_reqs).num_reqs == every[place - 1]


@settings(max_examples=max(settings.default.max_examples, 40))
@given(SPECS, st.data())
def test_drafters_follow_each_batch_of_the_target(spec: Spec, data: st.DataObject) -> None:
    """One draft prefill with its extra rows, then one token of each request for each further draft of a chain."""
    number = data.draw(st.integers(1, spec.limits.max_num_reqs))
    each = query_len_of(Role.TARGET, spec, number)
    batch = data.draw(
        st.sampled_from((Batch.decode(Role.TARGET, number, each, 1), Batch.mixed(Role.TARGET, number, 90)))
    )
    first, *passes = passes_of(batch, spec)
    assert first == (batch, 1)
    expected: list[tuple[Batch, int]] = []
    if spec.speculative is not None:
        k, slots = spec.speculative.draft_tokens(number), spec.speculative.extra_slots
        prefill = Batch(
            role=Role.DRAFT_PREFILL,
            num_reqs=number,
            num_tokens=batch.num_tokens + slots * number,
            query_len=batch.query_len and batch.query_len + slots,
            past_prompt=batch.past_prompt,
        )
        expected.append((prefill, 1))
        if k > 1 and spec.speculative.is_chain:
            expected.append((Batch.decode(Role.DRAFT_DECODE, number, 1), k - 1))
    assert passes == expected
