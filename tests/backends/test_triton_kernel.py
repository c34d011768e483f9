"""The Triton kernels, under Triton's interpreter, against a loop over tokens and heads."""

import math
from contextlib import contextmanager

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.errors import BackendError, RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.plugins.backend import LayerCache, Metadata, Scoring
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import DataType, Latent
from capture_planner.records.spec import Limits
from capture_planner_triton import Triton, geometry
from support import attention_cases, triton_rig

triton = pytest.importorskip("triton", reason="the Triton kernels need triton, which is not installed")

KINDS = {torch.float32: DataType.FLOAT32, torch.float16: DataType.FLOAT16}
"""The interpreter multiplies bfloat16 as if it were integers: tests/gpu has that."""
FEWER = settings(max_examples=max(settings.default.max_examples // 6, 2))


@pytest.fixture(scope="module")
def interpreted():
    """The executor's module with kernels under Triton's interpreter."""
    return triton_rig.load_executor(interpreted=True)


@pytest.fixture(scope="module")
def compiled():
    """The executor's module as on a machine with a GPU."""
    return triton_rig.load_executor(interpreted=False)


@attrs.frozen(kw_only=True)
class Cut:
    """Sizes so small that a few keys are many tiles, and a few tokens many blocks."""

    keys: int
    rows: int
    multiprocessors: int


CUTS = st.builds(
    Cut, keys=st.sampled_from([4, 16]), rows=st.sampled_from([2, 8]), multiprocessors=st.sampled_from([1, 8, 64])
)


def cases(*dtypes):
    """Return the batches of the reference backend, in the dtypes that the interpreter takes."""
    return attention_cases.cases(st.sampled_from(dtypes or list(KINDS))).map(
        lambda case: attrs.evolve(
            case, attention=attrs.evolve(case.attention, dtype=KINDS[case.dtype], kv_dtype=KINDS[case.dtype])
        )
    )


@contextmanager
def cutting(cut):
    """Replace the tile sizes, which are for a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "MAX_KEYS", cut.keys)
        patch.setattr(geometry, "MIN_TILE", 2)
        patch.setattr(geometry, "MAX_ROWS", cut.rows)
        patch.setattr(geometry, "MAX_SPLITS", 4)
        yield


def strided(tensor, *order):
    """Return a copy in another order of axes, with a gap after each."""
    shape = [tensor.shape[axis] + 1 for axis in order]
    wide = torch.full(shape, math.nan, dtype=tensor.dtype).permute(*torch.tensor(order).argsort().tolist())
    view = wide[tuple(slice(size) for size in tensor.shape)]
    return view.copy_(tensor)


class Rig(attention_cases.Rig):
    """A case in memory, with the planned workspace full of NaN."""

    def __init__(self, module, case, cut, garbage=0, far=False):
        super().__init__(case, garbage)
        self.module, self.cut, self.far = module, cut, far
        gpu = Device(kind=DeviceKind.CUDA, name="g", capability="9.0", memory=1, multiprocessors=cut.multiprocessors)
        environment = Environment(name="e", device=gpu, packages={"triton": "3.6.0"})
        limits = Limits(max_num_reqs=case.num_reqs, max_num_tokens=case.num_tokens)
        with cutting(cut):
            need = Triton().workspace(Role.TARGET, case.attention, environment, (self.entry,), limits)
        caches = self.caches
        if far:
            self.query = strided(self.query, 1, 0, 2)
            caches = {
                layer: LayerCache(keys=strided(cache.keys, 0, 2, 1, 3), values=strided(cache.values, 2, 0, 3, 1))
                for layer, cache in caches.items()
            }
        self.reservation = attrs.evolve(
            self.reservation,
            environment=environment,
            caches=caches,
            workspace=torch.full((need.device,), 255, dtype=torch.uint8),
        )

    def run(self, metadata):
        """Reserve, prepare and attend; the output starts as NaN."""
        with cutting(self.cut), triton_rig.interpreting():
            runs = self.module.TritonExecutor(self.reservation)
            runs.prepare(metadata)
            query = self.query[: metadata.num_tokens]
            out = torch.full(query.shape, math.nan, dtype=query.dtype)
            if self.far:
                out = strided(out, 1, 0, 2)
            runs.attend(attention_cases.LAYER, query, out, self.scoring, metadata)
        return out


@settings(max_examples=max(settings.default.max_examples // 3, 3))
@given(cases(), CUTS, st.booleans())
def test_kernels_equal_a_loop_over_tokens(interpreted, case, cut, far):
    """In a graph, between its pieces and in an eager step; padded rows are zeros."""
    rig = Rig(interpreted, case, cut, far=far)
    piecewise = Entry(mode=GraphMode.PIECEWISE, num_tokens=case.num_tokens)
    padded, eager = rig.run(rig.padded), rig.run(rig.unpadded())
    between = rig.run(attrs.evolve(rig.unpadded(piecewise), num_tokens=case.num_tokens))
    expected = rig.expected()
    for out in (padded, eager, between):
        attention_cases.assert_close(case, out[: case.real], expected)
        assert not out[case.real :].any()


@FEWER
@given(cases(), CUTS, st.integers(1, 1 << 16))
def test_kernels_ignore_garbage(interpreted, case, cut, garbage):
    """In free slots, freed pages, the null page, padded queries and table cells past the sequence."""
    one, other = Rig(interpreted, case, cut), Rig(interpreted, case, cut, garbage)
    assert torch.equal(one.run(one.padded), other.run(other.padded))


@FEWER
@given(cases(), CUTS)
def test_kernels_recognise_padded_rows_by_their_queries(interpreted, case, cut):
    """Even if their length is not 0, as the backend of another group may require."""
    rig = Rig(interpreted, case, cut)
    expected = rig.run(rig.padded)
    rig.fields["seq_lens"][len(case.lengths) :] = 2
    assert torch.equal(rig.run(rig.padded), expected)


@FEWER
@given(cases(torch.float32).filter(lambda case: case.query_len or case.max_query_len), CUTS)
def test_mixed_graphs_equal_graphs_of_decodes(interpreted, case, cut):
    """A program that searches for its request finds the one that a uniform or varying graph assigns."""
    decodes = Rig(interpreted, case, cut)
    mixed = Rig(interpreted, attrs.evolve(case, query_len=None, max_query_len=None), cut)
    attention_cases.assert_close(case, mixed.run(mixed.padded), decodes.run(decodes.padded))


@FEWER
@given(cases(torch.float32), st.integers(1, 12))
def test_number_of_splits_does_not_change_the_result(interpreted, case, parts):
    """Not even more parts than tiles of keys: surplus parts have no weight."""
    cut = Cut(keys=4, rows=8, multiprocessors=1)

    def split(number):
        rig, make = Rig(interpreted, case, cut), geometry.geometry
        room = max(geometry.partial_bytes(case.attention, case.num_tokens, 32), len(rig.reservation.workspace))
        rig.reservation = attrs.evolve(rig.reservation, workspace=torch.full((room,), 255, dtype=torch.uint8))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreted, "geometry", lambda *args, **how: attrs.evolve(make(*args, **how), splits=number))
            return rig.run(rig.padded)

    attention_cases.assert_close(case, split(parts), split(1))


@FEWER
@given(cases(), CUTS)
def test_fp8_cache_is_its_values(interpreted, case, cut):
    """Keys and values in FP8 E4M3 give what the same numbers give in the activations' type, bit for bit."""
    rig, eight_bit = Rig(interpreted, case, cut), torch.float8_e4m3fn

    def run(dtype, kind):
        caches = {
            layer: LayerCache(keys=cache.keys.to(eight_bit).to(dtype), values=cache.values.to(eight_bit).to(dtype))
            for layer, cache in rig.caches.items()
        }
        attention = attrs.evolve(case.attention, kv_dtype=kind)
        rig.reservation = attrs.evolve(rig.reservation, caches=caches, attention=attention)
        return rig.run(rig.padded)

    assert torch.equal(run(eight_bit, DataType.FP8), run(case.dtype, case.attention.kv_dtype))


def test_kernels_compile_for_a_gpu(compiled, tmp_path, monkeypatch):
    """Down to PTX, within the 99 KiB of shared memory that every supported device has."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    attention = Attention(num_layers=1, num_heads=16, num_kv_heads=8, head_dim=128, max_model_len=4096, max_query_len=1)
    shape = {"group": 2, "head_dim": 128, "page_size": 16, "causal": True}
    for capability, query_len in ((80, 1), (90, None)):
        cut = geometry.geometry(attention, 132, num_reqs=8, num_tokens=512, query_len=query_len, max_seq_len=4096)
        sizes = {"width": cut.width, "rows": cut.rows, "queries": cut.queries, "tile": cut.keys}
        exact = query_len is not None
        choices = {"softcapped": True, "uniform": exact, "split": exact}
        kernel = build(compiled.attend, capability, cut, **shape, **sizes, **choices)
        assert "cp.async" in kernel.asm["ptx"]
        assert kernel.metadata.shared <= 99 << 10
    choices = {"window": None, "softcapped": False, "uniform": False, "split": False}
    kinds = {"keys": "*fp8e4nv", "values": "*fp8e4nv"}
    eight_bit = build(compiled.attend, 90, cut, kinds=kinds, **shape, **sizes, **choices)
    assert "e4m3x2" in eight_bit.asm["ptx"]
    assert "st.global" in build(compiled.merge, 80, cut, head_dim=128, width=128, most=8).asm["ptx"]


def build(kernel, capability, cut, kinds=(), **constants):
    """Compile a kernel with bfloat16 activations whose rows are contiguous; ``kinds`` are of other parameters."""
    other = dict(kinds)
    constants |= {name: 1 for name in kernel.arg_names if name.endswith("_dim") and name != "head_dim"}
    kinds = dict.fromkeys(("query", "keys", "values", "out"), "*bf16")
    kinds |= dict.fromkeys(("partial", "sums", "sinks"), "*fp32")
    kinds |= dict.fromkeys(("starts", "lengths", "table"), "*i32")
    kinds |= dict.fromkeys(("scale", "softcap"), "fp32")
    kinds |= dict.fromkeys(constants, "constexpr") | other
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.endswith(("_token", "_head", "_page", "_slot", "_row"))
    }
    return triton.compile(
        triton.compiler.ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=triton.backends.compiler.GPUTarget("cuda", capability, 32),
        options={"num_warps": cut.warps, "num_stages": cut.stages, "enable_fp_fusion": True},
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention": {"latent": Latent(kv_lora_rank=512, rope_head_dim=64)}}, "latent attention"),
        ({"attention": {"kv_dtype": DataType.FP8}}, r"torch.float32 .*, expected torch.float8_e4m3fn"),
        ({"attention": {"kv_dtype": DataType.NVFP4}}, "nvfp4 KV cache"),
        ({"attention": {"num_kv_heads": 2}}, r"\[3, 16, 1, 8\], expected torch.float32 \[num_pages, 16, 2, 8\]"),
        ({"page_size": 8}, r"expected torch.float32 \[num_pages, 8, 1, 8\]"),
        ({"workspace": torch.zeros(287, dtype=torch.uint8)}, "needs a workspace of 288 bytes, and it has 287"),
        ({"device": torch.device("cuda")}, r"interpreted.*cuda"),
    ],
)
def test_reserve_rejects_unsupported_groups(interpreted, changes, says):
    """With the expected values."""
    interpreted.TritonExecutor(triton_rig.small_reservation())
    if "attention" in changes:
        changes = {"attention": attrs.evolve(triton_rig.small_reservation().attention, **changes["attention"])}
    with pytest.raises(BackendError, match=says):
        interpreted.TritonExecutor(triton_rig.small_reservation(**changes))


def test_reserve_rejects_compiled_kernels_on_a_cpu(compiled):
    """The message names the variable that selects the interpreter."""
    with pytest.raises(BackendError, match=r"compiled.*cpu.*TRITON_INTERPRET"):
        compiled.TritonExecutor(triton_rig.small_reservation())


@pytest.mark.parametrize("wrong", ["query", "out", "dtype"])
def test_attend_rejects_wrong_shapes_and_dtypes(interpreted, wrong):
    """The kernel would read or write beyond the end."""
    runs = interpreted.TritonExecutor(triton_rig.small_reservation())
    step = Metadata(entry=None, num_reqs=1, num_tokens=1, max_query_len=1, max_seq_len=1, fields={}, host={})
    rows = {name: torch.zeros(2 if wrong == name else 1, 2, 8) for name in ("query", "out")}
    if wrong == "dtype":
        rows["query"] = rows["query"].half()
    with pytest.raises(RunError, match=r"expected torch.float32 \[1, 2, 8\]"):
        runs.attend(0, rows["query"], rows["out"], Scoring(scale=1.0), step)


def test_empty_step_writes_zeros(interpreted):
    """Without requests, every row is padding."""
    runs = interpreted.TritonExecutor(triton_rig.small_reservation())
    step = Metadata(entry=None, num_reqs=0, num_tokens=2, max_query_len=0, max_seq_len=0, fields={}, host={})
    runs.prepare(step)
    out = torch.full((2, 2, 8), math.nan)
    runs.attend(0, out.clone(), out, Scoring(scale=1.0), step)
    assert not out.any()
    assert runs.layout() is None
    runs.release()
