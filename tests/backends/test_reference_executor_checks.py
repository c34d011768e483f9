"""What the reference backend's executor rejects, and what ``release`` drops."""

from __future__ import annotations

import gc
import weakref

import attrs
import numpy as np
import pytest
import torch

from capture_planner.errors import BackendError, RunError
from capture_planner.modes import Role
from capture_planner.plugins.backend import LayerCache, Metadata, Reservation, RunnableBackend, Scoring
from capture_planner.records.model import DataType, Latent
from capture_planner.records.spec import Limits
from capture_planner_reference import Reference

LENGTHS = [5, 2, 0]
NAMES = ["query_start_loc", "seq_lens", "block_table"]


@pytest.fixture
def reservation(machine, layers, graph):
    """Layers 1 and 4 of one group, and a graph of three requests of 2 tokens on pages of 4."""
    host = {"query_start_loc": [0, 2, 4, 4], "seq_lens": LENGTHS, "block_table": [[3, 1], [2, 0], [0, 0]]}
    return Reservation(
        role=Role.TARGET,
        group="all",
        attention=layers(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_query_len=2),
        environment=machine(None),
        entries=(graph(3, 2),),
        limits=Limits(max_num_reqs=3, max_num_tokens=6),
        caches={n: LayerCache(keys=torch.ones(4, 4, 2, 8), values=torch.ones(4, 4, 2, 8)) for n in (1, 4)},
        page_size=4,
        fields={name: torch.tensor(value, dtype=torch.int32) for name, value in host.items()},
        workspace=torch.empty(0, dtype=torch.uint8),
        pinned=torch.empty(0, dtype=torch.uint8),
        device=torch.device("cpu"),
    )


@pytest.fixture
def step(reservation):
    """The metadata of that graph, with two real requests."""
    return Metadata(
        entry=reservation.entries[0],
        num_reqs=3,
        num_tokens=6,
        max_query_len=2,
        max_seq_len=8,
        fields=reservation.fields,
        host={name: field.numpy().copy() for name, field in reservation.fields.items()},
    )


def eager(step, **host):
    """The same step without a graph; keywords replace host values."""
    values = {name: np.array(value) for name, value in host.items()}
    return attrs.evolve(step, entry=None, host=step.host | values)


def test_reference_is_runnable_and_has_no_layout(reservation, step):
    """By the runtime's own protocol; it has no layout after a step either."""
    assert isinstance(Reference(), RunnableBackend)
    runs = Reference().reserve(reservation)
    runs.prepare(step)
    assert runs.layout() is None


def test_release_drops_the_caches(reservation):
    """Nothing that the executor holds keeps them alive."""
    caches = {4: LayerCache(keys=torch.ones(4, 4, 2, 8), values=torch.ones(4, 4, 2, 8))}
    keys = weakref.ref(caches[4].keys)
    runs = Reference().reserve(attrs.evolve(reservation, caches=caches))
    caches.clear()
    gc.collect()
    assert keys() is not None
    runs.release()
    gc.collect()
    assert keys() is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"latent": Latent(kv_lora_rank=512, rope_head_dim=64)}, "latent attention; it runs ordinary heads"),
        ({"kv_dtype": DataType.NVFP4}, "NVFP4"),
        ({"head_dim": 16}, r"layer 1: keys are \[4, 4, 2, 8\], expected \[num_pages, 4, 2, 16\]"),
    ],
)
def test_reserve_rejects_unsupported_layers(reservation, changes, says):
    """With the role, the group and what it can run."""
    asked = attrs.evolve(reservation, attention=attrs.evolve(reservation.attention, **changes))
    with pytest.raises(BackendError, match=f"target, group all.*{says}"):
        Reference().reserve(asked)


@pytest.mark.parametrize("shape", [(4, 4, 2, 4), (16, 2, 8)])
def test_reserve_rejects_values_of_another_shape(reservation, shape):
    """Narrower than keys, as latent attention and some hybrids have them, or without pages."""
    cache = LayerCache(keys=torch.ones(4, 4, 2, 8), values=torch.ones(shape))
    with pytest.raises(BackendError, match=r"layer 4: values are \[.*\], expected \[num_pages, 4, 2, 8\]"):
        Reference().reserve(attrs.evolve(reservation, caches={4: cache}))


@pytest.mark.parametrize(
    ("name", "cut", "says"),
    [
        ("query_start_loc", slice(3), r"query_start_loc is \[3\], expected \[4\] for 3 requests"),
        ("seq_lens", slice(2), r"seq_lens is \[2\], expected \[3\]"),
        ("block_table", slice(2), r"block_table is \[2, 2\], expected \[3, 2\]"),
        ("block_table", (slice(3), slice(1)), r"block_table is \[3, 1\], expected \[3, 2\]"),
    ],
)
def test_prepare_rejects_fields_of_the_wrong_extent(reservation, step, name, cut, says):
    """With the shape that there is and the one that the step says, in a graph and without."""
    runs = Reference().reserve(reservation)
    step = attrs.evolve(step, fields=step.fields | {name: step.fields[name][cut]})
    for metadata in (step, eager(step)):
        with pytest.raises(RunError, match=says):
            runs.prepare(metadata)


@pytest.mark.parametrize("name", ["query", "out"])
def test_attend_rejects_rows_of_the_wrong_extent(reservation, step, name):
    """The queries, or the output."""
    runs = Reference().reserve(reservation)
    tensors = {"query": torch.ones(6, 4, 8), "out": torch.ones(6, 4, 8)}
    tensors[name] = tensors[name][:5]
    with pytest.raises(RunError, match=rf"layer 4: {name} is \[5, 4, 8\], expected \[6, 4, 8\]"):
        runs.attend(4, **tensors, scoring=Scoring(scale=1.0), metadata=step)


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ({"seq_lens": [5, 1, 0]}, "request 1: a query of 2 tokens in a sequence of 1; seq_lens counts"),
        ({"query_start_loc": [0, 2, 1, 1]}, "request 1: a query of -1 tokens"),
    ],
)
def test_prepare_rejects_a_query_longer_than_its_sequence(reservation, step, host, says):
    """Its first tokens would stand before position 0; a query of the whole sequence fits."""
    runs = Reference().reserve(reservation)
    runs.prepare(eager(step))
    with pytest.raises(RunError, match=says):
        runs.prepare(eager(step, **host))
