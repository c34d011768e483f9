import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, GraphSupport, Refresh, Role
from capture_planner.records.backend import Axis, Bound, Fill, Lifetime, PaddingContract, Where
from capture_planner.records.batch import Entry
from capture_planner.records.model import DataType, Latent
from capture_planner.records.spec import Limits
from capture_planner_flashinfer import FlashInfer
from capture_planner_flashinfer.workspace import INT_WORKSPACE, cta_tile_q, eager, tensor_core, workspace_parts

BACKEND = FlashInfer()
LIMITS = Limits(max_num_reqs=256, max_num_tokens=8192)
LATENT = Latent(kv_lora_rank=512, rope_head_dim=64)
NEVER, UNIFORM = GraphSupport.NEVER, GraphSupport.UNIFORM_BATCH
SINGLE = GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
FP16 = {"dtype": DataType.FLOAT16, "kv_dtype": DataType.FLOAT16}
CAPABILITIES = ["7.5", "8.0", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"]


@pytest.mark.parametrize(
    ("name", "level", "says"),
    [
        ("h100", UNIFORM, "XQA"),
        ("h200", UNIFORM, "FlashInfer 0.7.2 on NVIDIA H200 (SM90)"),
        ("b200", UNIFORM, "trtllm-gen"),
        ("a100", UNIFORM, "below SM90 take uniform causal queries"),
        ("l40s", UNIFORM, "SM89"),
        ("t4", NEVER, "Tesla T4 (SM75) has no bfloat16"),
        ("cpu", NEVER, "the CPU x86-64"),
    ],
)
def test_support_on_shipped_environments(committed, layers, name, level, says):
    support = BACKEND.support(Role.TARGET, layers(), committed(name))
    assert support.level is level
    assert says in support.reason


@pytest.mark.parametrize(
    ("capability", "changes", "level", "says"),
    [
        ("7.0", FP16, NEVER, "needs SM75"),
        ("7.5", FP16, UNIFORM, "FA2"),
        ("7.5", FP16 | {"head_dim": 512}, NEVER, "flashinfer#3526"),
        ("8.0", {"causal": False}, SINGLE, "only if causal"),
        ("9.0", {"causal": False}, UNIFORM, "XQA"),
        ("12.0", {"causal": False}, UNIFORM, "XQA"),
        ("10.0", {"causal": False}, SINGLE, "non-causal"),
        ("9.0", {"head_dim": 512}, SINGLE, "head dimension 512"),
        ("9.0", {"head_dim": 72}, SINGLE, "head dimension 72"),
        ("10.0", {"head_dim": 72}, UNIFORM, "trtllm-gen"),
        ("9.0", {"num_heads": 12}, SINGLE, "12 query heads, 8 KV heads"),
        ("10.0", {"num_heads": 12}, SINGLE, "12 query heads, 8 KV heads"),
        ("9.0", {"kv_dtype": DataType.NVFP4}, SINGLE, "nvfp4"),
        ("12.0", {"kv_dtype": DataType.NVFP4}, UNIFORM, "XQA"),
        ("11.0", {}, SINGLE, "neither XQA nor trtllm-gen"),
        ("8.0", {"decode_context": 2}, SINGLE, "2 decode-context ranks"),
        ("9.0", {"decode_context": 2}, SINGLE, "2 decode-context ranks"),
        ("10.0", {"decode_context": 2}, SINGLE, "2 decode-context ranks"),
        ("10.0", {"latent": LATENT}, UNIFORM, "trtllm-gen"),
        ("10.0", {"latent": LATENT, "causal": False}, UNIFORM, "trtllm-gen"),
        ("10.0", {"latent": LATENT, "decode_context": 4}, SINGLE, "4 decode-context ranks"),
        ("9.0", {"latent": LATENT}, NEVER, "latent attention needs SM100"),
    ],
)
def test_support_by_hardware_and_shape(machine, layers, capability, changes, level, says):
    support = BACKEND.support(Role.TARGET, layers(**changes), machine(capability))
    assert support.level is level
    assert says in support.reason


@pytest.mark.parametrize(
    ("packages", "says"),
    [({}, "flashinfer-python is not installed"), ({"flashinfer-python": "0.6.15"}, "flashinfer#3620")],
)
def test_support_by_version(machine, layers, packages, says):
    support = BACKEND.support(Role.TARGET, layers(**FP16), machine("7.5", packages))
    assert support.level is NEVER
    assert says in support.reason


@given(
    role=st.sampled_from(list(Role)),
    capability=st.sampled_from([None, "7.0", *CAPABILITIES]),
    causal=st.booleans(),
    heads=st.sampled_from([(32, 8), (64, 8), (32, 32), (128, 1), (12, 8)]),
    head_dim=st.sampled_from([16, 64, 72, 128, 256, 512]),
    decode_context=st.sampled_from([1, 2, 8]),
    latent=st.sampled_from([None, LATENT]),
)
def test_support_never_includes_mixed_batches(
    machine, layers, role, capability, causal, heads, head_dim, decode_context, latent
):
    model = layers(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        causal=causal,
        decode_context=decode_context,
        latent=latent,
    )
    support = BACKEND.support(role, model, machine(capability))
    assert support.level <= (UNIFORM if decode_context == 1 else SINGLE)


PAGES = ["paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"]


@pytest.mark.parametrize(
    ("capability", "changes", "names"),
    [
        ("8.0", {"num_kv_heads": 32}, [*PAGES, "plan_info"]),
        ("8.0", {}, [*PAGES, "qo_indptr", "plan_info"]),
        ("8.0", {"num_kv_heads": 32, "kv_dtype": DataType.FP8}, [*PAGES, "qo_indptr", "plan_info"]),
        ("8.0", {"max_query_len": 4}, [*PAGES, "qo_indptr", "kv_lens", "plan_info"]),
        ("9.0", {"head_dim": 512}, [*PAGES, "qo_indptr", "plan_info"]),
        ("9.0", {}, ["max_query_len", "max_seq_len"]),
        ("9.0", {"max_query_len": 4}, ["max_query_len", "max_seq_len", "seq_lens"]),
        ("10.0", {"latent": LATENT}, ["max_query_len", "max_seq_len"]),
        ("7.0", {}, []),
    ],
)
def test_fields_by_kernel_family(machine, layers, capability, changes, names):
    contract = BACKEND.padding(Role.TARGET, layers(**changes), machine(capability))
    assert [field.name for field in contract.fields] == names


def test_padded_rows_have_no_pages_on_host_and_device(machine, layers):
    contract = BACKEND.padding(Role.TARGET, layers(), machine("8.0"))
    offsets, pages, last = (contract[name] for name in PAGES)
    assert (offsets.axis, offsets.fill, offsets.where) == (Axis.REQUEST_PLUS_ONE, Fill.REPEAT_LAST, Where.BOTH)
    assert (pages.axis, pages.value, pages.indexes, pages.where) == (Axis.PAGE, 0, Bound.PAGES, Where.DEVICE)
    assert (last.axis, last.value, last.where) == (Axis.REQUEST, 0, Where.BOTH)


def test_query_offsets_are_frozen_for_decode_wrappers_only(machine, layers):
    ramp = BACKEND.padding(Role.TARGET, layers(), machine("8.0"))["qo_indptr"]
    ragged = BACKEND.padding(Role.TARGET, layers(max_query_len=4), machine("8.0"))["qo_indptr"]
    assert (ramp.fill, ramp.lifetime) == (Fill.WORST_CASE, Lifetime.FROZEN)
    assert (ragged.fill, ragged.lifetime) == (Fill.REAL_TOTAL, Lifetime.EVERY_STEP)


@pytest.mark.parametrize(("changes", "numbers"), [({"num_kv_heads": 32}, 10), ({}, 15), ({"max_query_len": 2}, 15)])
def test_plan_info_is_frozen(machine, layers, changes, numbers):
    plan = BACKEND.padding(Role.TARGET, layers(**changes), machine("8.0"))["plan_info"]
    assert (plan.axis, plan.scale, plan.dtype) == (Axis.SCALAR, numbers, "int64")
    assert (plan.lifetime, plan.where) == (Lifetime.FROZEN, Where.HOST)


def test_padded_sequences_are_as_long_as_their_query(machine, layers):
    field = BACKEND.padding(Role.TARGET, layers(max_query_len=4), machine("9.0"))["seq_lens"]
    assert (field.fill, field.value) == (Fill.CONSTANT, 4)


@given(capability=st.sampled_from(CAPABILITIES), query_len=st.sampled_from([1, 4]), kv_heads=st.sampled_from([8, 32]))
def test_prefill_wrappers_alone_limit_requests(machine, layers, capability, query_len, kv_heads):
    model = layers(max_query_len=query_len, num_kv_heads=kv_heads, **FP16)
    support = BACKEND.support(Role.TARGET, model, machine(capability))
    has_buffer = any(f.name == "kv_lens" for f in BACKEND.padding(Role.TARGET, model, machine(capability)).fields)
    assert support.max_num_reqs == (32768 if has_buffer else None)


@pytest.mark.parametrize(
    ("capability", "changes", "refresh"),
    [
        ("9.0", {}, Refresh.IN_GRAPH),
        ("10.0", {}, Refresh.IN_GRAPH),
        ("12.0", {}, Refresh.IN_GRAPH),
        ("10.0", {"latent": LATENT}, Refresh.IN_GRAPH),
        ("10.0", {"latent": LATENT, "decode_context": 2}, Refresh.HOST),
        ("8.0", {}, Refresh.HOST),
        ("9.0", {"head_dim": 512}, Refresh.HOST),
        (None, {}, Refresh.HOST),
    ],
)
def test_refresh_by_hardware(machine, layers, capability, changes, refresh):
    assert BACKEND.refresh(Role.DRAFT_DECODE, layers(**changes), machine(capability)) is refresh


def test_workspace_covers_vllm_40023_to_the_byte(machine, layers, graph):
    model = layers(num_heads=32, num_kv_heads=2, head_dim=256)
    old = machine("10.3", {"flashinfer-python": "0.6.9"})
    sums = 32 * 1023 * 16 * 4
    assert tensor_core(model, old, graph(512)) == 536346624 + sums


def test_workspace_rows_are_shared_by_a_query_group_since_0_7_1(machine, layers, graph):
    model, entry = layers(num_kv_heads=8), graph(256, 4)
    old, new = (machine("8.0", {"flashinfer-python": version}) for version in ("0.6.9", "0.7.1"))
    assert tensor_core(model, old, entry) == 4 * tensor_core(model, new, entry)


@pytest.mark.parametrize(
    ("packed", "head_dim", "major", "tile"),
    [
        (16, 128, 8, 16),
        (17, 128, 8, 64),
        (16, 128, 7, 64),
        (65, 128, 8, 128),
        (65, 256, 9, 64),
        (33, 512, 9, 32),
        (8, 512, 9, 16),
    ],
)
def test_query_tile_sizes(packed, head_dim, major, tile):
    assert cta_tile_q(packed, head_dim, major) == tile


def test_workspace_has_a_wrapper_for_each_batch_shape(machine, layers, graph):
    entries = [graph(8), graph(16), graph(16, active_loras=3), graph(16, draft_steps=2), graph(8, 4)]
    need = BACKEND.workspace(Role.TARGET, layers(), machine("8.0"), entries, LIMITS)
    assert need.pinned == (3 + 1) * INT_WORKSPACE, "one more is for eager steps"
    assert need.device > need.pinned
    assert "ceil(tokens * group / cta_tile_q) + reqs - 1" in need.formula


@pytest.mark.parametrize("changes", [{}, {"latent": LATENT}])
def test_kernels_without_a_plan_need_only_the_eager_wrapper(machine, layers, graph, changes):
    need = BACKEND.workspace(Role.TARGET, layers(**changes), machine("10.0"), [graph(8)], LIMITS)
    assert need.pinned == INT_WORKSPACE
    assert "trtllm-gen" in need.formula


def test_decode_context_ranks_need_softmax_sums(machine, layers, graph):
    one, two = (
        BACKEND.workspace(
            Role.TARGET, layers(latent=LATENT, decode_context=n), machine("10.0"), [graph(256)], LIMITS
        ).device
        for n in (1, 2)
    )
    assert two >= one + 256 * 64 * 256 * 8


def test_eager_steps_need_a_wrapper_on_supported_devices(machine, layers, graph):
    piecewise = [Entry(mode=GraphMode.PIECEWISE, num_tokens=512)]
    for entries in (piecewise, []):
        need = BACKEND.workspace(Role.TARGET, layers(), machine("8.0"), entries, LIMITS)
        assert need.pinned == INT_WORKSPACE
        assert need.device == INT_WORKSPACE + eager(layers(), machine("8.0"))
    assert BACKEND.workspace(Role.TARGET, layers(), machine("7.0"), [graph(8)], LIMITS).device == 0


@pytest.mark.parametrize("capability", ["9.0", "10.0"])
def test_counters_are_shared_with_no_other_launch(machine, layers, graph, capability):
    """XQA and trtllm-gen find their counters zero, whatever an eager plan wrote between."""
    model, where = layers(max_query_len=4), machine(capability)
    cut = workspace_parts(model, where, [graph(256, 4)])
    assert cut.counters >= 256 * 32 * 4
    assert cut.floats >= eager(model, where)
    assert cut.device == INT_WORKSPACE + cut.counters + cut.floats


def test_xqa_takes_no_window_with_several_tokens_before_0_7_1(machine, layers):
    for version, level in (("0.6.9", SINGLE), ("0.7.1", UNIFORM)):
        where = machine("9.0", {"flashinfer-python": version})
        support = BACKEND.support(Role.TARGET, layers(window=128, max_query_len=4), where)
        assert support.level is level
        assert BACKEND.support(Role.TARGET, layers(window=128), where).level is UNIFORM
        assert BACKEND.support(Role.TARGET, layers(max_query_len=4), where).level is UNIFORM


@given(
    capability=st.sampled_from(CAPABILITIES),
    kv_heads=st.sampled_from([1, 8, 32]),
    head_dim=st.sampled_from([64, 128, 256, 512]),
    query_len=st.sampled_from([1, 2, 4]),
    sizes=st.lists(st.integers(1, 1024), min_size=1, max_size=8),
    more=st.integers(1, 1024),
)
def test_workspace_grows_with_entries_and_batches(
    machine, layers, graph, capability, kv_heads, head_dim, query_len, sizes, more
):
    model = layers(num_kv_heads=kv_heads, head_dim=head_dim, max_query_len=query_len)

    def need(reqs):
        entries = [graph(n, query_len) for n in reqs]
        return BACKEND.workspace(Role.TARGET, model, machine(capability), entries, LIMITS)

    fewer, all_of_them, larger = need(sizes), need([*sizes, more]), need([n + more for n in sizes])
    assert all_of_them.device >= fewer.device
    assert all_of_them.pinned >= fewer.pinned
    assert larger.device >= fewer.device


def test_padding_declares_nothing_on_a_cpu(machine, layers):
    assert BACKEND.padding(Role.TARGET, layers(), machine(None)) == PaddingContract()
