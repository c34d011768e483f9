"""Rows of a served batch: each is compared with what its request's tokens give, as far as those are known."""

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
from capture_planner_runner.conformance.failure import Violation
from capture_planner_runner.conformance.steps import check_served_rows

ROW = st.tuples(st.integers(0, 3), st.integers(0, 3), *[st.sampled_from((False, False, True))] * 3)


def attended(ids: torch.Tensor, first: int) -> torch.Tensor:
    """Return a value of each token from ``first`` on, by all tokens up to it."""
    return (ids.cumsum(0) + 1)[first:].double().view(-1, 1, 1)


@given(st.lists(ROW, min_size=1, max_size=4))
def test_the_first_wrong_row_of_known_tokens_is_found(rows: list[tuple[int, int, bool, bool, bool]]) -> None:
    """Rows of no tokens, of tokens that the host has not read, and of unknown ones are passed over, one by one."""
    tokens = np.full((len(rows), 9), -1)
    places, starts, positions, hidden = [], [0], [], []
    expected = None
    for row, (first, count, unread, unknown, wrong) in enumerate(rows):
        place = len(rows) - 1 - row
        ids = np.arange(first + count) * row
        tokens[place, : len(ids)] = ids
        right = attended(torch.from_numpy(ids), first).flatten(1)
        if wrong and count:
            right[-1] += 100
            expected = row if expected is None and not (unread or unknown) else expected
        if unknown and count:
            tokens[place, first] = -1
        places.append(place)
        starts.append(starts[-1] + count)
        positions += range(first, first + count)
        hidden.append(right)
    unread_rows = np.array([unread for _, _, unread, _, _ in rows])
    states = SimpleNamespace(tokens=tokens, is_unread=lambda mapping: unread_rows)
    stage: Any = SimpleNamespace(
        watch=SimpleNamespace(serving=lambda: SimpleNamespace(scheduler=SimpleNamespace(states=states))),
        target=SimpleNamespace(tables=SimpleNamespace(shape=SimpleNamespace(width=1), attended=attended)),
        runner=SimpleNamespace(target=SimpleNamespace(hidden=torch.cat(hidden))),
        on_device=torch.from_numpy,
        tolerance=1e-9,
    )
    inputs = SimpleNamespace(
        idx_mapping=np.array(places), query_start_loc=np.array(starts), positions=np.array([*positions, 0])
    )
    step: Any = SimpleNamespace(inputs=inputs, entry=None)
    role: Any = SimpleNamespace(role=Role.TARGET)
    is_wrong = pytest.raises(Violation, match=f"of request {expected} in a batch that is served")
    with nullcontext() if expected is None else is_wrong:
        check_served_rows(stage, role, step)
