"""What a finding says: the row of a served request, private buffers, exact sizes, where an error was raised."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from capture_planner.errors import BackendError
from capture_planner.modes import Role
from capture_planner.planning.planner import plan
from capture_planner.plugins.backend import Metadata, Reservation, Scoring
from capture_planner_conformance import Case, Check, Failure, Scene, Shape, play, under_test, usable_shapes, with_causes
from capture_planner_conformance.failure import Violation
from capture_planner_conformance.scene import FEATURES, Arrive, RunBatch, Serve
from capture_planner_conformance.shapes import usable_features
from capture_planner_conformance.stage import widened
from capture_planner_conformance.steps import _wrong_draft, error_text, first_wrong_row
from capture_planner_reference import Reference
from capture_planner_reference.executor import ReferenceExecutor
from support.runs import CPU

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=4, longest=24)
PAST = Arrive(prompt=3, computed=3)
ONE, TWO = RunBatch(rows=((0, 1, 0),)), RunBatch(rows=((0, 1, 0), (1, 1, 0)))


def backend_of(executor: type[ReferenceExecutor]) -> Any:
    """Return the reference with another executor."""
    return type("Changed", (Reference,), {"name": "changed", "reserve": lambda self, given: executor(given)})()


class PaddedIsWrong(ReferenceExecutor):
    """Doubles what a graph of more than one request attends to."""

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        super().attend(layer, query, out, scoring, metadata)
        if metadata.is_full and metadata.num_reqs > 1:
            out.mul_(2)


class KeepsTable(ReferenceExecutor):
    """Copies the rows of the table that have changed, so that an old page stays where one is 0."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self.copies = {"table": torch.zeros_like(reservation.fields["block_table"])}

    def prepare(self, metadata: Metadata) -> None:
        super().prepare(metadata)
        table, copy = metadata.fields["block_table"], self.copies["table"][: metadata.num_reqs]
        copy[:, : table.shape[1]] = torch.where(copy[:, : table.shape[1]] > 0, copy[:, : table.shape[1]], table)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        fields = {**metadata.fields, "block_table": self.copies["table"][: metadata.num_reqs]}
        changed = attrs.evolve(metadata, fields=fields) if metadata.is_full else metadata
        super().attend(layer, query, out, scoring, changed)


class ShortBuffer(ReferenceExecutor):
    """Has room for one request."""

    def prepare(self, metadata: Metadata) -> None:
        super().prepare(metadata)
        lengths = torch.zeros(1, dtype=torch.int32)
        lengths[torch.arange(metadata.num_reqs)] = metadata.fields["seq_lens"]


def played(executor: type[ReferenceExecutor], *steps: Any, **scene: Any) -> Failure:
    """Return the finding of a case."""
    failure = play(under_test(backend_of(executor)), Case(scene=Scene(shape=SHAPE, **scene), steps=steps)).failure
    assert failure is not None
    return failure


def found(executor: type[ReferenceExecutor], *steps: Any, **scene: Any) -> Failure:
    """Return the finding of a case, with its causes."""
    return with_causes(under_test(backend_of(executor)), played(executor, *steps, **scene))


def test_a_wrong_row_of_a_request_that_is_served_is_found_before_its_token() -> None:
    """With its role, its graph and its batch."""
    row = played(PaddedIsWrong, Serve(requests=((5, 6, 0),)), size_reqs=(3,))
    assert row.check is Check.ROWS
    assert row.role is Role.TARGET
    assert row.entry is not None
    assert row.batch
    assert "served 0, a request that is served" in row.message


def test_what_passes_at_exact_sizes_is_said_to() -> None:
    """One request in a graph of three, and in a graph of one; the reference's rows do not depend on it."""
    padded = found(PaddedIsWrong, PAST, ONE, size_reqs=(3,))
    assert "it passes at exact sizes and fails padded" in str(padded)
    exact = found(PaddedIsWrong, PAST, PAST, TWO, num_reqs=2, size_reqs=(2,))
    assert not exact.notes


def test_a_private_buffer_is_named() -> None:
    """A table in a dictionary of the executor, which keeps pages of a request that has left."""
    other = RunBatch(rows=((1, 1, 0),))
    failure = found(KeepsTable, PAST, PAST, ONE, other, num_reqs=2, size_reqs=(2,))
    assert "private buffer copies['table'] of target, group all" in failure.causes


def test_an_error_says_in_which_line_of_a_backend_it_was_raised() -> None:
    """An index that is too large is no raw IndexError."""
    failure = played(ShortBuffer, PAST, PAST, TWO)
    assert "lengths[torch.arange(metadata.num_reqs)]" in failure.message
    assert "test_causes.py" in failure.message


def test_an_error_in_a_check_is_said_to_be_one() -> None:
    """What a forward left has a shape that no check expects."""
    with pytest.raises(RuntimeError) as raised:
        first_wrong_row(torch.zeros(2, 4), torch.zeros(3, 4), 4, 1.0)
    message = Violation.of(raised.value).failure.message
    assert "in a check of the suite, whose values have another shape or range than they may, at `off = " in message
    assert "(steps.py, line " in message


class AddsTheNullPage(ReferenceExecutor):
    """Adds the null page with a weight of 0."""

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        super().attend(layer, query, out, scoring, metadata)
        if metadata.is_full:
            out.add_(0 * self._caches[layer].values[0, 0, 0])


def test_a_row_of_nan_is_called_so_and_says_where_to_read_on() -> None:
    """Of a target, and of a draft decode: no word of tokens."""
    failure = found(AddsTheNullPage, PAST, ONE, size_reqs=(3,))
    assert "NaN in row 0" in failure.message
    assert any("docs/extending/backend-contract.md" in note for note in failure.notes)
    assert _wrong_draft(1, torch.tensor([[1.0, float("nan")]])) == (
        "the row that draft 2 or one after it is made of is NaN"
    )
    assert _wrong_draft(1, torch.ones(1, 2)) == "draft 2 is not the likeliest token of its row"


@pytest.mark.parametrize(
    ("off", "size", "says"),
    [
        (float("nan"), 1.0, "NaN"),
        (float("inf"), 1.0, "infinite"),
        (0.5, 0.0, "off by 0.5 where it must be 0"),
        (0.5, 2.0, "off by 0.25 of its norm"),
    ],
)
def test_an_error_is_told_in_words(off: float, size: float, says: str) -> None:
    """No NaN of a norm, and no division by zero."""
    assert error_text(torch.tensor(off), torch.tensor(size)) == says


class NoCaps(ReferenceExecutor):
    """Refuses soft caps, and breaks at sinks."""

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        if scoring.softcap is not None:
            raise BackendError("it has no soft caps")
        if scoring.sinks is not None:
            raise KeyError("sinks")
        super().attend(layer, query, out, scoring, metadata)


def test_a_refused_feature_is_not_tried_and_a_broken_one_is() -> None:
    """An error of the backend's own is a refusal, with its reason; any other is for the search to find."""
    tested = under_test(backend_of(NoCaps))
    usable, refused = usable_features(tested, usable_shapes(tested)[0][0])
    assert set(FEATURES) - set(usable) == {"softcap"}
    assert [(each.name, each.reason) for each in refused] == [("soft capping", "it has no soft caps")]


def test_a_widened_plan_has_its_largest_entries_beyond_the_limits() -> None:
    """One entry of each kind, by as much as was asked for, or aligned; the others are as planned."""
    tested = under_test("reference")
    for ranks, more in ((1, 2), (4, 1)):
        scene = Scene(shape=SHAPE, num_reqs=3, num_tokens=16, size_reqs=(1, 3), drafts=2, ranks=ranks)
        narrow = plan(scene.spec("reference"), CPU, tested.registry)
        wide = widened(narrow, more, tested.registry)
        for before, after in zip(narrow.roles, wide.roles, strict=True):
            changed = [(old, new) for old, new in zip(before.entries, after.entries, strict=True) if old != new]
            assert len(changed) == len({(e.mode, e.query_len, e.draft_steps) for e in before.entries})
            for old, new in changed:
                assert new.num_tokens >= old.num_tokens + more
                assert new.num_tokens % ranks == 0
                assert old.num_reqs is None or new.num_reqs > 3
