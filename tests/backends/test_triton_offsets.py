"""The Triton kernels where offsets need more than 32 bits, under Triton's interpreter."""

import attrs
import pytest
import torch

from capture_planner.plugins.backend import LayerCache, Metadata, Scoring
from capture_planner.records.model import DataType
from capture_planner_triton.geometry import entry_geometry, partial_bytes
from support import triton_rig

pytest.importorskip("triton", reason="the Triton kernels need triton, which is not installed")


@pytest.fixture(scope="module")
def interpreted():
    """The executor's module with kernels under Triton's interpreter."""
    return triton_rig.load_executor(interpreted=True)


@pytest.mark.parametrize("multiprocessors", [1, 8], ids=["whole", "split"])
@pytest.mark.parametrize("axis", ["page", "head", "dim"])
def test_kernels_take_offsets_past_32_bits(interpreted, axis, multiprocessors):
    """Caches of more than 2**31 elements, and layouts whose heads or elements lie far apart."""
    heads, dim, size, length = 3, 3, 16, 40
    try:
        memory = torch.empty((1 << 31) + (1 << 16), dtype=torch.float16)  # touched in a few places alone
    except RuntimeError:
        pytest.skip("no 4 GiB of address space")
    names = {"query": ("token", "head", "dim"), "out": ("token", "head", "dim")}
    names |= dict.fromkeys(("keys", "values"), ("page", "slot", "head", "dim"))
    extents = {"token": 1, "page": 3, "slot": size, "head": heads, "dim": dim}
    tensors, drawn = {}, torch.Generator().manual_seed(1)
    for number, (name, axes) in enumerate(names.items()):
        shape = [extents[each] for each in axes]
        near = torch.empty(shape).stride()
        strides = [1 << 30 if each == axis else step for each, step in zip(axes, near, strict=True)]
        tensors[name] = memory.as_strided(shape, strides, number << 12)
        tensors[name].copy_(torch.randn(shape, generator=drawn))
    attention = attrs.evolve(
        triton_rig.small_reservation().attention, num_heads=heads, num_kv_heads=heads, head_dim=dim,
        dtype=DataType.FLOAT16, kv_dtype=DataType.FLOAT16,
    )  # fmt: skip
    environment = triton_rig.small_reservation().environment
    environment = attrs.evolve(environment, device=attrs.evolve(environment.device, multiprocessors=multiprocessors))
    splits = entry_geometry(attention, environment, triton_rig.small_reservation().entries[0]).splits
    assert (splits > 1) is (multiprocessors > 1)
    table = torch.tensor([[2, 1, 2]], dtype=torch.int32)
    runs = interpreted.TritonExecutor(
        triton_rig.small_reservation(
            attention=attention,
            environment=environment,
            caches={0: LayerCache(keys=tensors["keys"], values=tensors["values"])},
            workspace=torch.zeros(partial_bytes(attention, 1, splits), dtype=torch.uint8),
        )
    )
    fields = {
        "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
        "seq_lens": torch.tensor([length], dtype=torch.int32),
        "block_table": table,
    }
    step = Metadata(
        entry=triton_rig.small_reservation().entries[0], num_reqs=1, num_tokens=1, max_query_len=1, max_seq_len=256,
        fields=fields, host={},
    )  # fmt: skip
    with triton_rig.interpreting():
        runs.attend(0, tensors["query"], tensors["out"], Scoring(scale=0.5), step)
    key, value = (tensors[name][table[0].long()].flatten(0, 1)[:length].float() for name in ("keys", "values"))
    weights = (torch.einsum("thd,khd->htk", tensors["query"].float(), key) * 0.5).softmax(-1)
    expected = torch.einsum("htk,khd->thd", weights, value)
    torch.testing.assert_close(tensors["out"].float(), expected, atol=2e-3, rtol=2e-3)
