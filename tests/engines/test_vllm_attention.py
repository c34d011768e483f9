"""vLLM's attention backends as backends: what they declare, and what runs, with stand-ins for vLLM."""

import sys
from types import SimpleNamespace
from unittest import mock

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import BackendError
from capture_planner.modes import GraphMode, GraphSupport, Refresh, Role
from capture_planner.plugins.registry import load_backends
from capture_planner.records._base import replace
from capture_planner.records.backend import Attention, Support
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import DataType, Latent
from capture_planner_conformance.scene import Arrive, Case, RunBatch, Scene, Serve, Shape, dumps
from capture_planner_conformance.stage import under_test
from capture_planner_conformance.suite import replay
from capture_planner_vllm.attention.backend import VllmAttention
from support import vllm_attention

ENGINES = ("FLASH_ATTN", "TRITON_ATTN")
LAYERS = Attention(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, max_model_len=160, max_query_len=3)
SMALL = Shape(dtype="float32", heads=2, kv_heads=1, head_dim=4, page_size=4, longest=24)


class StandInAttention(VllmAttention):
    """Said to run here, where there is no GPU."""

    def support(self, role, model, environment):
        return Support(level=GraphSupport.ALWAYS, reason="with stand-ins")

    def _refusal(self, model, environment):
        return None


def machine(capability, version="0.33.0"):
    kind = DeviceKind.CPU if capability is None else DeviceKind.CUDA
    device = Device(kind=kind, name="GPU", capability=capability, memory=80 << 30, multiprocessors=capability and 132)
    return Environment(name="test", device=device, packages={} if version is None else {"vllm": version})


@pytest.mark.parametrize("engine", ENGINES)
def test_distribution_registers_both_backends(engine):
    registered = load_backends()[f"vllm_{engine.lower()}"]
    assert (registered.distribution, registered.backend.engine) == ("capture-planner-vllm", engine)


@given(
    engine=st.sampled_from(ENGINES),
    capability=st.sampled_from([None, "7.5", "8.0", "9.0", "10.0", "12.0"]),
    version=st.sampled_from([None, "0.32.1", "0.33.0", "0.33.1"]),
    head_dim=st.sampled_from([20, 64, 128, 576]),
    dtype=st.sampled_from([DataType.FLOAT32, DataType.BFLOAT16]),
    kv_dtype=st.sampled_from([DataType.FLOAT32, DataType.BFLOAT16, DataType.FP8]),
    latent=st.sampled_from([None, Latent(kv_lora_rank=512, rope_head_dim=64)]),
    ranks=st.sampled_from([1, 2]),
)
def test_support_is_the_builders_or_never_with_a_reason(
    engine, capability, version, head_dim, dtype, kv_dtype, latent, ranks
):
    """Where something is missing, nothing is declared, and drafts are not refreshed in a graph."""
    model = attrs.evolve(LAYERS, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, latent=latent, decode_context=ranks)
    where, backend = machine(capability, version), VllmAttention(engine)
    support = backend.support(Role.TARGET, model, where)
    assert backend.workspace(Role.TARGET, model, where, (), None).device == 0
    fields = {field.name for field in backend.padding(Role.TARGET, model, where).fields}
    refresh = backend.refresh(Role.DRAFT_DECODE, model, where)
    runs = (
        capability is not None
        and version in ("0.33.0", "0.33.1")
        and kv_dtype is dtype
        and latent is None
        and ranks == 1
        and (engine == "TRITON_ATTN" or dtype is not DataType.FLOAT32)
        and (engine == "TRITON_ATTN" or (head_dim % 8 == 0 and head_dim <= 256))
        and (engine == "FLASH_ATTN" or head_dim >= 32)
        and (engine == "TRITON_ATTN" or capability != "7.5")
    )
    assert (support.level is not GraphSupport.NEVER) == runs
    assert "GPU" in support.reason
    if not runs:
        assert (fields, refresh) == (set(), Refresh.HOST)
    else:
        third = engine == "TRITON_ATTN" or capability in ("9.0", "10.0")
        assert support.level is (GraphSupport.ALWAYS if third else GraphSupport.UNIFORM_BATCH)
        assert fields == {"max_query_len"} | ({"max_seq_len"} if engine == "FLASH_ATTN" else set())
        assert refresh is Refresh.IN_GRAPH


def case(drafts=0, mode=GraphMode.FULL_AND_PIECEWISE, shape=SMALL, **scene):
    """Requests in and past their prompts, small after large, and two that are served to their end."""
    sizes = {"num_reqs": 3, "num_tokens": 12, "size_tokens": (12,), "size_reqs": (1, 3)}
    steps = (
        Arrive(prompt=9),
        Arrive(prompt=6, computed=6),
        RunBatch(rows=((0, 7, 0), (1, 1 + drafts, 0))),
        RunBatch(rows=((1, 1 + drafts, 0),)),
        RunBatch(rows=((0, 2, 0), (1, 1, 0))),
        Serve(requests=((4, 5, 0), (9, 3, 1))),
    )
    return dumps(Case(scene=Scene(shape=shape, mode=mode, drafts=drafts, **sizes | scene), steps=steps))


def run(text, backend=None):
    with vllm_attention.stand_in():
        return replay(under_test(backend or StandInAttention("FLASH_ATTN")), text)


@pytest.mark.parametrize(
    "text",
    [
        case(mode=GraphMode.FULL),
        case(mode=GraphMode.PIECEWISE),
        case(shape=attrs.evolve(SMALL, windowed=True)),
        case(drafts=2, fused=False),
        case(drafts=2, ahead=True),
    ],
    ids=["full", "piecewise", "windowed", "drafts", "chain"],
)
def test_replays_of_vllms_builder_compute_attention(text):
    result = run(text)
    assert result.failure is None
    assert result.log.forwards


@pytest.mark.parametrize(
    ("change", "law"),
    [
        ({"update_draft_decode_metadata": lambda self, metadata: None, "build": vllm_attention.Builder.build}, "rows"),
        ({"build_for_cudagraph_capture": lambda self, common: shortened(self, common)}, "rows"),
    ],
    ids=["schedule is never made", "captured with the maxima of a batch"],
)
def test_planted_bug_of_the_builder_is_found(change, law):
    """The kernel of a graph sees what the builder left in its buffer, and the numbers of the capture."""
    with mock.patch.multiple(vllm_attention.Builder, **change):
        result = run(case(drafts=2))
    assert result.failure is not None
    assert result.failure.check.value in (law, "eager", "state", "tokens")


def shortened(builder, common):
    common.max_seq_len = 5
    return builder.build(0, common)


def test_chain_refreshes_its_schedule_inside_the_graph():
    """Before a replay of a whole chain vLLM builds nothing, so that without the refresh the schedule is old."""
    built = vllm_attention.Builder.build

    def build(self, prefix, common):
        self.built = built(self, prefix, common)
        return self.built

    def update(self, metadata):
        if not hasattr(self, "built"):
            refresh(self, metadata)

    refresh = vllm_attention.Builder.update_draft_decode_metadata
    with mock.patch.multiple(vllm_attention.Builder, build=build, update_draft_decode_metadata=update):
        result = run(case(drafts=3))
    assert result.failure is not None


def test_rows_without_a_request_stay_unwritten_as_in_vllm():
    result = run(case(), StandInAttention("FLASH_ATTN", zeroes=False))
    assert result.failure.check.value == "written"


@pytest.mark.parametrize("shape", [SMALL, attrs.evolve(SMALL, windowed=True)], ids=["decodes", "short sequences"])
def test_schedule_by_the_maxima_of_a_batch_is_wrong_in_a_graph(shape):
    """Of vLLM's runner: the kernel of a mixed graph, or with a window, finds another layout than it reads."""
    mode = GraphMode.FULL if shape is SMALL else GraphMode.FULL_DECODE_ONLY
    scene = Scene(shape=shape, mode=mode, num_reqs=1, num_tokens=2, size_tokens=(2,), size_reqs=(1,))
    text = dumps(Case(scene=scene, steps=(Arrive(prompt=1, computed=1), RunBatch(rows=((0, 1, 0),)))))
    assert run(text).failure is None
    assert run(text, StandInAttention("FLASH_ATTN", frozen=False)).failure.check.value == "rows"


def test_lengths_of_a_capture_are_the_runners():
    """TRITON_ATTN's builder sets them all to 1, also those of padding, which a graph in a chain does not write."""
    scene = Scene(
        shape=SMALL,
        mode=GraphMode.FULL_DECODE_ONLY,
        num_reqs=1,
        num_tokens=3,
        size_tokens=(),
        size_reqs=(),
        drafts=2,
        fused=False,
        ahead=True,
        beyond=1,
    )
    assert run(dumps(Case(scene=scene, steps=(Serve(requests=((1, 1, 0),)),)))).failure is None


def test_scoring_of_a_model_reaches_the_implementation():
    """A layer is made with the usual scale; a model with another, a cap or sinks gets an implementation of its own."""
    with vllm_attention.stand_in():
        from capture_planner_vllm.attention.executor import VllmExecutor

        made = vllm_attention.Implementation(4, 64, 0.125, 2, None, 7, "auto")
        executor = SimpleNamespace(_layers={0: SimpleNamespace(impl=made)}, _attention=replace(LAYERS, window=7))

        def implementation(**scoring):
            given = SimpleNamespace(**{"scale": 0.125, "softcap": None, "sinks": None} | scoring)
            return VllmExecutor._implementation(executor, 0, given)

        assert implementation() is made
        other = implementation(scale=0.5, softcap=30.0)
    assert (other.scale, other.softcap, other.window) == (0.5, 30.0, 7)


def test_absent_vllm_and_another_release_are_refused_with_what_to_install():
    backend = VllmAttention("TRITON_ATTN")
    with mock.patch.dict(sys.modules, {"vllm": None}), pytest.raises(BackendError, match=r"install vllm==0\.33"):
        backend.reserve(None)
    with vllm_attention.stand_in((0, 34, 1)), pytest.raises(BackendError, match=r"0\.34\.1 is installed"):
        backend.reserve(None)


def test_refusal_of_vllm_is_the_backends():
    """With the group and vLLM's reason; so is a cache that another backend laid out."""
    odd = attrs.evolve(SMALL, head_dim=6)
    with vllm_attention.stand_in(), pytest.raises(BackendError, match="vLLM refuses the group: FLASH_ATTN does not"):
        raise_failure(replay(under_test(StandInAttention("FLASH_ATTN")), case(shape=odd)))
    unpacked = StandInAttention("FLASH_ATTN")
    unpacked.packs_cache = False
    with vllm_attention.stand_in(), pytest.raises(BackendError, match="name the same backend for all roles"):
        raise_failure(replay(under_test(unpacked), case()))


def raise_failure(result):
    raise BackendError(result.failure.message)
