"""Rows of served requests: each is compared with what its request's tokens give, as far as it reads those."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner_conformance.failure import Check, Violation
from capture_planner_conformance.served_rows import RequestRows, ServedForward, pieces
from capture_planner_conformance.steps import check_served_rows

TOKENS = {"a": (3, 1, 4, 1, 5, 9), "b": (2, 7, 1)}
ROWS = st.lists(
    st.tuples(
        st.sampled_from(sorted(TOKENS)), st.integers(0, 6), st.integers(1, 3), st.integers(0, 4), st.integers(0, 3)
    ),
    min_size=1,
    max_size=4,
)


def attended(ids: torch.Tensor, first: int) -> torch.Tensor:
    """Return a value of each token from ``first`` on in each of two layers, by all tokens up to it."""
    total = (ids.cumsum(0) + 1)[first:].double()
    return torch.stack([total, -total], dim=1)[:, :, None]


def cache_of(shift: int) -> Any:
    """Return the cache of a model whose second layer may read later tokens than the first."""
    tables = SimpleNamespace(
        attended=attended, by_token=torch.zeros(1), shape=SimpleNamespace(width=1), name=lambda layer: f"layer {layer}"
    )
    return SimpleNamespace(tables=tables, shifts=(shift, shift))


@given(st.lists(ROWS, min_size=1, max_size=3), st.integers(0, 1))
def test_the_first_wrong_row_that_reads_its_requests_tokens_is_found(
    forwards: list[list[tuple[str, int, int, int, int]]], shift: int
) -> None:
    """Rows after a token that is another, and rows of a request that has ended, are passed over, one by one.

    A token that the host had not read is that of the request.
    """
    ran, expected = [], None
    for number, rows in enumerate(forwards):
        made, outputs, start = [], [], 0
        for name, first, count, other, wrong in rows:
            ids = np.array([*TOKENS[name][shift:], *[11] * 9][first : first + count])
            right = attended(torch.tensor([*TOKENS[name][shift:], *[11] * 9]), 0)[first : first + count].clone()
            known = min(count, max(len(TOKENS[name]) - shift - first, 0))
            if other < count:
                ids[other], known = (-1, known) if other % 2 else (12, min(known, other))
            if wrong < count:
                right[wrong, 1] += 100
                if wrong < known and expected is None:
                    expected = f"layer 1, .* in row {wrong} of {name}.*; {number + 1} request"
            made.append(RequestRows(name=name, where=slice(start, start + count), first=first, ids=ids))
            outputs.append(right)
            start += count
        batch = Batch(role=Role.TARGET, num_reqs=number + 1, num_tokens=99)
        given_rows = {"rows": tuple(made), "outputs": torch.cat(outputs)}
        ran.append(ServedForward(role=Role.TARGET, entry=None, batch=batch, **given_rows))
    cache = cache_of(shift)
    stage: Any = SimpleNamespace(
        watch=SimpleNamespace(served_forwards=ran), world=SimpleNamespace(caches=(cache,)), tolerance=1e-9
    )
    with nullcontext() if expected is None else pytest.raises(Violation, match=expected) as raised:
        check_served_rows(stage, TOKENS)
    if expected is not None:
        assert raised.value.failure.check is Check.EAGER
    cache.shifts = (shift, shift + 1)
    assert all(piece.got.shape[1] == piece.want.shape[1] == 1 for piece in pieces(ran, cache, TOKENS))
