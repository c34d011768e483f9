"""The reference backend's executor, against a loop over tokens and heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from capture_planner.modes import GraphMode
from capture_planner.plugins.backend import LayerCache
from capture_planner.records.batch import Entry
from capture_planner_reference import Reference, executor
from capture_planner_runner.execution.context import merged
from support.attention_cases import LAYER, Rig, assert_close, cases


@given(cases(), st.sampled_from([1, 200, 1 << 24]))
def test_graph_and_eager_attention_equal_a_loop_over_tokens(case, elements):
    """In blocks of any size; padded rows are zeros."""
    rig = Rig(case)
    piecewise = Entry(mode=GraphMode.PIECEWISE, num_tokens=case.num_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_ELEMENTS", elements)
        padded, eager = rig.run(rig.padded), rig.run(rig.unpadded())
        between = rig.run(attrs.evolve(rig.unpadded(piecewise), num_tokens=case.num_tokens))
    assert_close(case, padded[: case.real], rig.expected())
    assert_close(case, eager, rig.expected())
    assert torch.equal(eager, between[: case.real])
    for out in (padded, between):
        assert not out[case.real :].any()


@given(cases(), st.integers(1, 1 << 16))
def test_output_ignores_garbage(case, garbage):
    """In free slots, freed pages, the null page, padded queries and table cells past the sequence."""
    one, other = Rig(case), Rig(case, garbage)
    assert torch.equal(one.run(one.padded), other.run(other.padded))
    assert torch.equal(one.run(one.unpadded()), other.run(other.unpadded()))


@given(cases(st.just(torch.float64)))
def test_padding_changes_no_real_row(case):
    """A graph of larger extents gives the result of the exact extents."""
    large, exact = Rig(case), Rig(case.exact())
    assert_close(case, large.run(large.padded)[: case.real], exact.run(exact.padded)[: case.real])


@given(cases(st.just(torch.bfloat16) | st.just(torch.float16)))
def test_half_precision_is_rounded_once(case):
    """Scores, weights and sums are computed in float32, bit by bit."""
    half, single = Rig(case), Rig(attrs.evolve(case, dtype=torch.float32))
    for name in ("query", "keys", "values"):
        getattr(single, name).copy_(getattr(half, name))
    if half.scoring.sinks is not None and single.scoring.sinks is not None:
        single.scoring.sinks.copy_(half.scoring.sinks)
    assert torch.equal(half.run(half.padded), single.run(single.padded).to(case.dtype))
    assert torch.equal(half.run(half.unpadded()), single.run(single.unpadded()).to(case.dtype))


@given(cases())
def test_padded_rows_are_recognised_by_their_queries(case):
    """Even if their length is not 0, as the backend of another group may require."""
    rig = Rig(case)
    expected = rig.run(rig.padded)
    rig.fields["seq_lens"][len(case.lengths) :] = 2
    assert torch.equal(rig.run(rig.padded), expected)


def part_of(rig, metadata, ranks, rank):
    """Return what one of several ranks that share the KV says, and its sums, for the heads of one of them."""
    size = rig.case.page_size // ranks
    keys, values = (tensor.unflatten(1, (size, ranks))[:, :, rank] for tensor in (rig.keys, rig.values))
    reservation = attrs.evolve(
        rig.reservation,
        attention=attrs.evolve(rig.case.attention, decode_context=ranks),
        caches={LAYER: LayerCache(keys=keys.contiguous(), values=values.contiguous())},
        page_size=size,
        context_rank=rank,
    )
    runs = Reference().reserve(reservation)
    runs.prepare(metadata)
    # Each rank brings the same queries: heads of one KV head stay next to each other.
    query = rig.query[: metadata.num_tokens].repeat_interleave(ranks, dim=1)
    out = torch.full_like(query, math.nan)
    sums = query.new_full(query.shape[:2], math.nan, dtype=torch.promote_types(query.dtype, torch.float32))
    runs.attend_part(LAYER, query, out, sums, attrs.evolve(rig.scoring, sinks=None), metadata)
    return out[:, ::ranks].to(sums.dtype), sums[:, ::ranks]


@given(cases(), st.data())
def test_merged_parts_of_ranks_equal_a_loop_over_tokens(case, data):
    """Of any number that shares a page, with windows, sinks and softcaps; padded rows are zeros."""
    assume(case.page_size > 1)
    rig, ranks = Rig(case), data.draw(st.sampled_from([n for n in range(2, 17) if case.page_size % n == 0]))
    for metadata in (rig.padded, rig.unpadded()):
        parts, sums = map(
            torch.stack, zip(*(part_of(rig, metadata, ranks, rank) for rank in range(ranks)), strict=True)
        )
        found = merged(parts, sums, rig.scoring.sinks)
        assert_close(case, found[: case.real], rig.expected())
        assert not found[case.real :].any()


class RefuseHostReads(TorchDispatchMode):
    """Reject operators that read a device value on the host, for their result or its shape."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator if a graph can capture it."""
        refused = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        assert not refused, f"{func} in a graph"
        return func(*args, **(kwargs or {}))


@given(cases())
def test_no_device_value_is_read_on_the_host(case):
    """Neither by data-dependent operators, nor otherwise: tensors of the meta device have no values."""
    rig = Rig(case)
    with RefuseHostReads():
        rig.run(rig.padded)
        rig.run(rig.unpadded())
    meta = Rig(case, device="meta")
    assert meta.run(meta.padded).is_meta
    assert meta.run(meta.unpadded()).is_meta


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.nonzero, torch.unique])
def test_dispatch_mode_detects_host_reads(read: Callable[[torch.Tensor], object]):
    """The check of the test above can fail."""
    with RefuseHostReads(), pytest.raises(AssertionError, match="in a graph"):
        read(torch.ones(3)[:1])


@settings(max_examples=10)
@given(cases())
def test_graph_captured_with_an_empty_batch_serves_any(case):
    """A graph bakes in no number of the batch that it was captured with."""
    rig = Rig(case)

    def forward(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, fields: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        cache = {LAYER: LayerCache(keys=keys, values=values)}
        runs = Reference().reserve(attrs.evolve(rig.reservation, caches=cache, fields=fields))
        out = torch.full_like(query, math.nan)
        runs.attend(LAYER, query, out, rig.scoring, attrs.evolve(rig.padded, fields=fields))
        return out

    empty = {name: torch.zeros_like(field) for name, field in rig.fields.items()}
    tensors = rig.query, rig.keys, rig.values
    graph = make_fx(forward)(*tensors, empty)
    assert not graph(*tensors, empty).any()
    out = graph(*tensors, rig.fields)
    assert_close(case, out[: case.real], rig.expected())
    assert not out[case.real :].any()
