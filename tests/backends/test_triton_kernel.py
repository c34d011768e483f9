"""The Triton kernels, under Triton's interpreter, against a loop over tokens and heads."""

import math
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import capture_planner_triton
from capture_planner.errors import BackendError, RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import DataType, Latent
from capture_planner.records.spec import Limits
from capture_planner.runtime.executor import LayerCache, Metadata, Reservation, Scoring
from capture_planner_triton import Triton, geometry
from support.files import module_at

triton = pytest.importorskip("triton", reason="the Triton kernels need triton, which is not installed")
tl = triton.language


EXECUTOR = Path(capture_planner_triton.__file__).with_name("executor.py")
laws = module_at(Path(__file__).with_name("test_reference_executor.py"), "reference_laws")
KINDS = {torch.float32: DataType.FLOAT32, torch.float16: DataType.FLOAT16}
"""The interpreter multiplies bfloat16 as if it were integers: tests/gpu has that."""
FEWER = settings(max_examples=max(settings.default.max_examples // 6, 5))


@pytest.fixture(scope="module")
def interpreted():
    """The module, interpreted: Triton looks at the variable where a kernel is defined, not later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return module_at(EXECUTOR, "interpreted_executor")


@pytest.fixture(scope="module")
def compiled():
    """The module as it is on a machine with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return module_at(EXECUTOR, "compiled_executor")


@attrs.frozen(kw_only=True)
class Cut:
    """How a step is cut: so small that a handful of keys is many tiles, and a few tokens many blocks."""

    keys: int
    rows: int
    multiprocessors: int


CUTS = st.builds(
    Cut,
    keys=st.sampled_from([4, 16]),
    rows=st.sampled_from([2, 8]),
    multiprocessors=st.sampled_from([1, 8, 64]),
)


def cases(*dtypes):
    """Batches like those of the reference backend, in the dtypes that the interpreter takes."""
    return laws.cases(st.sampled_from(dtypes or list(KINDS))).map(
        lambda case: attrs.evolve(
            case,
            attention=attrs.evolve(case.attention, dtype=KINDS[case.dtype], kv_dtype=KINDS[case.dtype]),
        )
    )


STANDARD = {
    "cdiv": lambda x, y: (x + y - 1) // y,
    "max": lambda x, axis: tl.reduce(x, axis, tl.standard._elementwise_max),
    "sum": lambda x, axis: tl.reduce(x, axis, tl.standard._sum_combine),
    "zeros": lambda shape, dtype: tl.full(shape, 0, dtype),
}
"""What Triton writes in its own language, and so has compiled if it was imported without the variable."""


@contextmanager
def interpreting():
    """Run Triton's own functions in a way that leaves nothing behind for those who compile."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in STANDARD.items():
            patch.setattr(tl, name, function)
        yield


@contextmanager
def cutting(cut):
    """Replace the sizes of tiles, which are made for a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "MAX_KEYS", cut.keys)
        patch.setattr(geometry, "MIN_TILE", 2)
        patch.setattr(geometry, "MAX_ROWS", cut.rows)
        patch.setattr(geometry, "MAX_SPLITS", 4)
        yield


def strided(tensor, *order):
    """The same values, laid out in another order of axes and with a gap after each."""
    shape = [tensor.shape[axis] + 1 for axis in order]
    wide = torch.full(shape, math.nan, dtype=tensor.dtype).permute(*torch.tensor(order).argsort().tolist())
    view = wide[tuple(slice(size) for size in tensor.shape)]
    return view.copy_(tensor)


class Rig(laws.Rig):
    """A case in memory, with a workspace of what the plan says, full of NaN."""

    def __init__(self, module, case, cut, garbage=0, far=False):
        super().__init__(case, garbage)
        self.module, self.cut, self.far = module, cut, far
        gpu = Device(
            kind=DeviceKind.CUDA, name="g", capability="9.0", memory=1, multiprocessors=cut.multiprocessors
        )
        environment = Environment(name="e", device=gpu, packages={"triton": "3.6.0"})
        limits = Limits(max_num_reqs=case.num_reqs, max_num_tokens=case.num_tokens)
        with cutting(cut):
            need = Triton().workspace(Role.TARGET, case.attention, environment, (self.entry,), limits)
        caches = self.caches
        if far:
            self.query = strided(self.query, 1, 0, 2)
            caches = {
                layer: LayerCache(
                    keys=strided(cache.keys, 0, 2, 1, 3), values=strided(cache.values, 2, 0, 3, 1)
                )
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
        with cutting(self.cut), interpreting():
            runs = self.module.TritonExecutor(self.reservation)
            runs.prepare(metadata)
            query = self.query[: metadata.num_tokens]
            out = torch.full(query.shape, math.nan, dtype=query.dtype)
            if self.far:
                out = strided(out, 1, 0, 2)
            runs.attend(laws.LAYER, query, out, self.scoring, metadata)
        return out


@settings(max_examples=max(settings.default.max_examples // 3, 5))
@given(cases(), CUTS, st.booleans())
def test_every_way_equals_a_loop_over_tokens(interpreted, case, cut, far):
    """In a graph, between its pieces and in an eager step; rows of padding are zeros."""
    rig = Rig(interpreted, case, cut, far=far)
    piecewise = Entry(mode=GraphMode.PIECEWISE, num_tokens=case.num_tokens)
    padded, eager = rig.run(rig.padded), rig.run(rig.unpadded())
    between = rig.run(attrs.evolve(rig.unpadded(piecewise), num_tokens=case.num_tokens))
    expected = rig.expected()
    for out in (padded, eager, between):
        laws.assert_close(case, out[: case.real], expected)
        assert not out[case.real :].any()


@FEWER
@given(cases(), CUTS, st.integers(1, 1 << 16))
def test_garbage_changes_no_bit(interpreted, case, cut, garbage):
    """Of free slots, freed pages, the null page, padded queries and table cells past the sequence."""
    one, other = Rig(interpreted, case, cut), Rig(interpreted, case, cut, garbage)
    assert torch.equal(one.run(one.padded), other.run(other.padded))


@FEWER
@given(cases(), CUTS)
def test_a_padded_row_is_one_without_queries(interpreted, case, cut):
    """Also where its length is not 0, as another group's backend may want it."""
    rig = Rig(interpreted, case, cut)
    expected = rig.run(rig.padded)
    rig.fields["seq_lens"][len(case.lengths) :] = 2
    assert torch.equal(rig.run(rig.padded), expected)


@FEWER
@given(cases(torch.float32).filter(lambda case: case.query_len is not None), CUTS)
def test_a_mixed_graph_computes_what_a_uniform_one_does(interpreted, case, cut):
    """A program that looks for its request finds the one that it would have been given."""
    uniform = Rig(interpreted, case, cut)
    mixed = Rig(interpreted, attrs.evolve(case, query_len=None), cut)
    laws.assert_close(case, mixed.run(mixed.padded), uniform.run(uniform.padded))


@FEWER
@given(cases(torch.float32), st.integers(1, 12))
def test_any_number_of_parts_gives_the_same(interpreted, case, parts):
    """More parts than there are tiles of keys, too: those that are left over have no weight."""
    cut = Cut(keys=4, rows=8, multiprocessors=1)

    def split(number):
        rig, make = Rig(interpreted, case, cut), geometry.geometry
        room = max(
            geometry.partial_bytes(case.attention, case.num_tokens, 32), len(rig.reservation.workspace)
        )
        rig.reservation = attrs.evolve(rig.reservation, workspace=torch.full((room,), 255, dtype=torch.uint8))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                interpreted, "geometry", lambda *args, **how: attrs.evolve(make(*args, **how), splits=number)
            )
            return rig.run(rig.padded)

    laws.assert_close(case, split(parts), split(1))


def test_the_kernels_compile_for_a_gpu(compiled, tmp_path, monkeypatch):
    """What the interpreter runs is what the compiler takes, down to the machine's code, within 99 KiB."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    attention = Attention(
        num_layers=1, num_heads=16, num_kv_heads=8, head_dim=128, max_model_len=4096, max_query_len=1
    )
    for capability, query_len in ((80, 1), (90, None)):
        cut = geometry.geometry(
            attention, 132, num_reqs=8, num_tokens=512, query_len=query_len, max_seq_len=4096
        )
        kernel = build(
            compiled._attend,
            capability,
            cut,
            group=2,
            head_dim=128,
            width=cut.width,
            page_size=16,
            rows=cut.rows,
            queries=cut.queries,
            tile=cut.keys,
            window=100,
            causal=True,
            softcapped=True,
            uniform=query_len is not None,
            split=query_len is not None,
        )
        assert "cp.async" in kernel.asm["ptx"]
        assert kernel.metadata.shared <= 99 << 10
    assert "st.global" in build(compiled._merge, 80, cut, head_dim=128, width=128, most=8).asm["ptx"]


def build(kernel, capability, cut, **constants):
    """Compile a kernel with bfloat16 activations whose rows are contiguous."""
    constants |= {name: 1 for name in kernel.arg_names if name.endswith("_dim") and name != "head_dim"}
    kinds = dict.fromkeys(("query", "keys", "values", "out"), "*bf16")
    kinds |= dict.fromkeys(("partial", "sums", "sinks"), "*fp32")
    kinds |= dict.fromkeys(("starts", "lengths", "table"), "*i32")
    kinds |= dict.fromkeys(("scale", "softcap"), "fp32")
    kinds |= dict.fromkeys(constants, "constexpr")
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


def reservation(**changes):
    """A group of one layer on a CPU, with a graph of one request whose keys are split."""
    attention = Attention(
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_model_len=256,
        max_query_len=1,
        dtype=DataType.FLOAT32,
        kv_dtype=DataType.FLOAT32,
    )
    gpu = Device(kind=DeviceKind.CUDA, name="g", capability="9.0", memory=1, multiprocessors=8)
    cache = torch.zeros(3, 16, 1, 8)
    entries = (Entry(mode=GraphMode.FULL, num_tokens=1, num_reqs=1, query_len=1),)
    return attrs.evolve(
        Reservation(
            role=Role.TARGET,
            group="all",
            attention=attention,
            environment=Environment(name="e", device=gpu),
            entries=entries,
            limits=Limits(max_num_reqs=1, max_num_tokens=1),
            caches={0: LayerCache(keys=cache, values=cache)},
            page_size=16,
            fields={},
            workspace=torch.zeros(4 * 1 * 2 * 9 * 4, dtype=torch.uint8),
            pinned=torch.empty(0, dtype=torch.uint8),
            device=torch.device("cpu"),
        ),
        **changes,
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention": {"latent": Latent(kv_lora_rank=512, rope_head_dim=64)}}, "latent attention"),
        ({"attention": {"kv_dtype": DataType.FP8}}, "fp8 KV cache"),
        (
            {"attention": {"num_kv_heads": 2}},
            r"\[3, 16, 1, 8\], expected torch.float32 \[num_pages, 16, 2, 8\]",
        ),
        ({"page_size": 8}, r"expected torch.float32 \[num_pages, 8, 1, 8\]"),
        (
            {"workspace": torch.zeros(287, dtype=torch.uint8)},
            "needs a workspace of 288 bytes, and it has 287",
        ),
        ({"device": torch.device("cuda")}, r"interpreted.*cuda"),
    ],
)
def test_what_cannot_run_is_refused_in_reserve(interpreted, changes, says):
    """Before a graph is captured, with what was expected."""
    interpreted.TritonExecutor(reservation())
    if "attention" in changes:
        changes = {"attention": attrs.evolve(reservation().attention, **changes["attention"])}
    with pytest.raises(BackendError, match=says):
        interpreted.TritonExecutor(reservation(**changes))


def test_a_compiled_kernel_is_refused_on_a_cpu(compiled):
    """There is no CPU code in it."""
    with pytest.raises(BackendError, match=r"compiled.*cpu.*TRITON_INTERPRET"):
        compiled.TritonExecutor(reservation())


@pytest.mark.parametrize("wrong", ["query", "out", "dtype"])
def test_rows_of_another_shape_are_refused(interpreted, wrong):
    """The kernel would read or write beyond the end."""
    runs = interpreted.TritonExecutor(reservation())
    step = Metadata(entry=None, num_reqs=1, num_tokens=1, max_query_len=1, max_seq_len=1, fields={}, host={})
    rows = {name: torch.zeros(2 if wrong == name else 1, 2, 8) for name in ("query", "out")}
    if wrong == "dtype":
        rows["query"] = rows["query"].half()
    with pytest.raises(RunError, match=r"expected torch.float32 \[1, 2, 8\]"):
        runs.attend(0, rows["query"], rows["out"], Scoring(scale=1.0), step)


def test_an_empty_step_writes_zeros(interpreted):
    """No request: every row is padding."""
    runs = interpreted.TritonExecutor(reservation())
    step = Metadata(entry=None, num_reqs=0, num_tokens=2, max_query_len=0, max_seq_len=0, fields={}, host={})
    runs.prepare(step)
    out = torch.full((2, 2, 8), math.nan)
    runs.attend(0, out.clone(), out, Scoring(scale=1.0), step)
    assert not out.any()
    assert runs.layout() is None
    runs.release()
