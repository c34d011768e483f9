"""Recurrent layers: the pool of states, and the recurrence against a loop over tokens."""

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.records.spec import Limits
from capture_planner_runner.execution.attention import StateCache, ragged_segments, recurrence, uniform_segments
from capture_planner_runner.serving.scheduler import Scheduler
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request

WIDTH = 2


@attrs.frozen
class Row:
    """A request in a batch: its row in the pool, its tokens before and in the batch."""

    state: int
    before: int
    tokens: int


@st.composite
def batches(draw, uniform=False):
    """Any batch, with a number of positions that a row of the pool holds; or a decode of past requests."""
    positions = draw(st.integers(1, 4))
    count = draw(st.integers(1, 4))
    length = draw(st.integers(1, positions))
    states = draw(st.permutations(range(1, 6)))[:count]
    tokens = [length if uniform else draw(st.integers(0, 5)) for _ in range(count)]
    before = [draw(st.integers(1 if uniform else 0, 6)) for _ in range(count)]
    tokens[0] = max(tokens[0], 1)
    return positions, [Row(*row) for row in zip(states, before, tokens, strict=True)]


def one_by_one(row, inputs, decays):
    """The states after all of a request's tokens, one after the other."""
    states, state = [], torch.zeros(WIDTH, dtype=torch.float64)
    for value, decay in zip(inputs, decays, strict=True):
        state = decay.exp() * state + value
        states.append(state)
    return torch.stack(states) if states else torch.zeros(0, WIDTH, dtype=torch.float64)


def check(positions, rows, padding, seed, *, uniform):
    """Run a batch behind what its requests computed before, with padding of NaN, and compare every state."""
    draw = torch.Generator().manual_seed(seed)
    values = [torch.randn(row.before + row.tokens, WIDTH, generator=draw, dtype=torch.float64) for row in rows]
    decays = [-torch.rand(row.before + row.tokens, WIDTH, generator=draw, dtype=torch.float64) for row in rows]
    expected = [one_by_one(*each) for each in zip(rows, values, decays, strict=True)]
    cache = StateCache(states=torch.full((6, positions, WIDTH), torch.nan, dtype=torch.float64))
    for row, states in zip(rows, expected, strict=True):
        if row.before:
            cache.states[row.state, (row.before - 1) % positions] = states[row.before - 1]
    untouched = cache.states.clone()
    tokens = sum(row.tokens for row in rows)
    length = rows[0].tokens
    padded = padding * length if uniform else padding
    at = torch.cat([torch.arange(row.before, row.before + row.tokens) for row in rows] + [torch.zeros(padded).long()])
    garbage = torch.full((padded, WIDTH), torch.nan, dtype=torch.float64)
    inputs, fading = (
        torch.cat([each[row.before :] for row, each in zip(rows, parts, strict=True)] + [garbage])
        for parts in (values, decays)
    )
    indices = torch.tensor([row.state for row in rows] + [0] * padding, dtype=torch.int32)
    if uniform:
        segments = uniform_segments(indices, len(at), length)
    else:
        starts = torch.tensor([0, *(row.tokens for row in rows), *[0] * padding], dtype=torch.int32).cumsum(0)
        segments = ragged_segments(indices, at, starts.int())
    out = recurrence(cache, segments, at, inputs, fading)
    wanted = torch.cat([states[row.before :] for row, states in zip(rows, expected, strict=True)])
    torch.testing.assert_close(out[:tokens], wanted, rtol=1e-9, atol=1e-9)
    for row, states in zip(rows, expected, strict=True):
        for position in range(max(row.before, row.before + row.tokens - positions), row.before + row.tokens):
            torch.testing.assert_close(cache.states[row.state, position % positions], states[position])
    others = sorted(set(range(1, 6)) - {row.state for row in rows if row.tokens})
    torch.testing.assert_close(cache.states[others], untouched[others], rtol=0, atol=0, equal_nan=True)


@given(batches(), st.integers(0, 3), st.integers(0, 99))
def test_the_recurrence_of_any_batch_is_that_of_one_token_after_the_other(batch, padding, seed):
    check(*batch, padding, seed, uniform=False)


@given(batches(uniform=True), st.integers(0, 3), st.integers(0, 99))
def test_the_recurrence_of_a_uniform_decode_is_that_of_one_token_after_the_other(batch, padding, seed):
    check(*batch, padding, seed, uniform=True)


@given(st.integers(2, 6), st.integers(1, 6), st.integers(1, 8))
def test_running_requests_have_rows_of_their_own(pool_rows, most, count):
    """As many run at once as there are rows, and a row is free again when its request is finished."""
    requests = [Request(name=str(i), arrival=0.0, prompt=(1,), max_new_tokens=2) for i in range(count)]
    scheduler = Scheduler(
        requests,
        limits=Limits(max_num_reqs=most, max_num_tokens=64),
        speculative=None,
        pages=PageFormat(page_size=4, num_pages=20),
        max_model_len=8,
        pool_rows=pool_rows,
    )
    scheduler.arrive(0.0, 0.0)
    served = 0
    while not scheduler.done:
        scheduler.schedule()
        rows = [live.pool_row for live in scheduler.unfinished]
        assert len(set(rows)) == len(rows) == min(most, pool_rows - 1, count - served)
        assert set(rows) <= set(range(1, pool_rows))
        for live in scheduler.unfinished:
            assert scheduler.states.pool_row[live.state_index] == live.pool_row
        scheduler.finish(scheduler.unfinished[0])
        served += 1
