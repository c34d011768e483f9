import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, GraphSupport, Refresh, Role
from capture_planner.records.backend import Axis, Fill, Lifetime, PaddingContract, Where
from capture_planner.records.batch import Entry
from capture_planner.records.model import DataType, Latent
from capture_planner.records.spec import Limits
from capture_planner_flash_attention import FlashAttention

BACKEND = FlashAttention()
LIMITS = Limits(max_num_reqs=256, max_num_tokens=8192)
LATENT = Latent(kv_lora_rank=512, rope_head_dim=64)
TORCH = {"torch": "2.13.0"}
THREE = {"flash-attn-3": "3.0.0"}
NEVER, UNIFORM, ALWAYS = GraphSupport.NEVER, GraphSupport.UNIFORM_BATCH, GraphSupport.ALWAYS


@pytest.mark.parametrize(
    ("name", "level", "says"),
    [
        ("h100", ALWAYS, "FlashAttention 3 (3.0.0) on NVIDIA H100 80GB HBM3 (SM90)"),
        ("h200", ALWAYS, "FlashAttention 3"),
        ("b200", ALWAYS, "FlashAttention 4"),
        ("a100", UNIFORM, "vllm#22945"),
        ("l40s", UNIFORM, "FlashAttention 2"),
        ("t4", NEVER, "No flash-attention library supports Tesla T4 (SM75), so attention runs eagerly"),
        ("cpu", NEVER, "the CPU x86-64"),
    ],
)
def test_support_on_shipped_environments(committed, layers, name, level, says):
    support = BACKEND.support(Role.TARGET, layers(), committed(name))
    assert support.level is level
    assert says in support.reason


@pytest.mark.parametrize(
    ("capability", "packages", "level", "says"),
    [
        ("9.0", {"flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0b36"}, ALWAYS, "FlashAttention 4"),
        ("9.0", {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0"}, ALWAYS, "FlashAttention 3"),
        ("9.0", {"flash-attn": "2.8.3"} | TORCH, UNIFORM, "FlashAttention 2"),
        ("9.0", {"flash-attn-4": "4.0.0b36"}, ALWAYS, "FlashAttention 4"),
        ("10.0", {"flash-attn-3": "3.0.0"}, NEVER, "install flash-attn-4"),
        ("12.0", {"flash-attn-4": "4.0.0b36"} | TORCH, UNIFORM, "torch varlen"),
        ("9.0", TORCH, UNIFORM, "torch varlen attention (2.13.0)"),
        ("9.0", {"torch": "2.12.1"}, NEVER, "install flash-attn-4"),
        (
            "9.0",
            {"torch": "2.11.0"},
            NEVER,
            "torch varlen attention needs torch 2.13 or newer for paged caches, not 2.11.0",
        ),
        ("10.0", {"torch": "2.13.0"}, UNIFORM, "torch varlen attention (2.13.0)"),
        ("8.0", {"flash-attn-4": "4.0.0b36"}, NEVER, "FlashAttention 4 reads a paged cache on SM90 and SM100"),
        ("10.0", {"flash-attn-3": "3.0.0", "torch": "2.11.0"}, NEVER, "FlashAttention 3 is made for SM90, not SM10x"),
        ("8.0", {}, NEVER, "install flash-attn (GPU (SM80))"),
        ("7.5", TORCH, NEVER, "scaled_dot_product_attention"),
    ],
)
def test_preferred_installed_library_serves(machine, layers, capability, packages, level, says):
    support = BACKEND.support(Role.TARGET, layers(), machine(capability, packages))
    assert support.level is level
    assert says in support.reason


@pytest.mark.parametrize(
    ("capability", "changes", "level", "says"),
    [
        ("9.0", {"head_dim": 512}, NEVER, "up to 256"),
        ("9.0", {"head_dim": 192}, ALWAYS, "FlashAttention 4"),
        ("10.0", {"head_dim": 256}, ALWAYS, "FlashAttention 4"),
        ("10.0", {"head_dim": 192}, UNIFORM, "FlashAttention 2"),
        ("9.0", {"head_dim": 100}, NEVER, "multiples of 8"),
        ("8.0", {"head_dim": 512}, NEVER, "up to 256"),
        ("9.0", {"dtype": DataType.FLOAT32}, NEVER, "float32"),
        ("9.0", {"kv_dtype": DataType.FP8}, ALWAYS, "FlashAttention 3"),
        ("10.0", {"kv_dtype": DataType.FP8}, ALWAYS, "FlashAttention 4"),
        ("8.0", {"kv_dtype": DataType.FP8}, NEVER, "fp8"),
        ("10.0", {"kv_dtype": DataType.NVFP4}, NEVER, "nvfp4"),
        ("9.0", {"latent": LATENT}, UNIFORM, "latent attention for uniform batches"),
        ("9.0", {"latent": LATENT, "kv_dtype": DataType.FP8}, NEVER, "fp8"),
        ("10.0", {"latent": LATENT}, NEVER, "needs FlashAttention 3 on SM90"),
        ("8.0", {"latent": LATENT}, NEVER, "SM8x"),
    ],
)
def test_support_by_heads_and_cache(machine, layers, capability, changes, level, says):
    support = BACKEND.support(Role.TARGET, layers(**changes), machine(capability))
    assert support.level is level
    assert says in support.reason


def test_latent_attention_names_the_missing_package(machine, layers):
    support = BACKEND.support(Role.TARGET, layers(latent=LATENT), machine("9.0", TORCH))
    assert support.level is NEVER
    assert "flash-attn-3, which is not installed" in support.reason


@given(
    capability=st.sampled_from(["7.5", "8.0", "8.9", "9.0", "10.0", "12.0"]),
    have=st.sets(st.sampled_from(["torch", "flash-attn", "flash-attn-3", "flash-attn-4"])),
    more=st.sampled_from(["torch", "flash-attn", "flash-attn-3", "flash-attn-4"]),
)
def test_more_packages_never_lower_support(machine, layers, capability, have, more):
    def level(names):
        packages = {name: version for name, version in ALL.items() if name in names}
        return BACKEND.support(Role.TARGET, layers(), machine(capability, packages)).level

    assert level(have | {more}) >= level(have)


ALL = {"torch": "2.13.0", "flash-attn": "2.8.3", "flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0b36"}


@pytest.mark.parametrize(
    ("capability", "role", "changes", "names"),
    [
        ("9.0", Role.TARGET, {}, ["max_query_len", "max_seq_len", "num_splits", "scheduler_metadata"]),
        ("9.0", Role.DRAFT_PREFILL, {}, ["max_query_len", "max_seq_len", "num_splits", "scheduler_metadata"]),
        ("9.0", Role.DRAFT_DECODE, {}, ["max_query_len", "max_seq_len", "num_splits"]),
        ("10.0", Role.TARGET, {}, ["max_query_len", "max_seq_len"]),
        ("10.0", Role.TARGET, {"decode_context": 2}, ["max_query_len", "max_seq_len", "dcp_context_kv_lens"]),
        ("8.0", Role.TARGET, {}, ["max_query_len", "max_seq_len", "num_splits"]),
        ("7.5", Role.TARGET, {}, []),
        (None, Role.TARGET, {}, []),
    ],
)
def test_fields_by_library(machine, layers, capability, role, changes, names):
    where = machine(capability, THREE) if capability == "9.0" else machine(capability)
    contract = BACKEND.padding(role, layers(**changes), where)
    assert [field.name for field in contract.fields] == names


def test_padding_zeroes_the_tail_of_scheduler_metadata(machine, layers):
    field = BACKEND.padding(Role.TARGET, layers(), machine("9.0", THREE))["scheduler_metadata"]
    assert (field.axis, field.offset, field.scale, field.align) == (Axis.REQUEST, 1, 4, 4)
    assert (field.fill, field.value, field.lifetime) == (Fill.CONSTANT, 0, Lifetime.EVERY_STEP)


@pytest.mark.parametrize("name", ["max_query_len", "max_seq_len", "num_splits"])
def test_launch_scalars_are_frozen_at_their_worst_case(machine, layers, name):
    field = BACKEND.padding(Role.TARGET, layers(), machine("9.0", THREE))[name]
    assert (field.axis, field.fill) == (Axis.SCALAR, Fill.WORST_CASE)
    assert (field.lifetime, field.where) == (Lifetime.FROZEN, Where.HOST)


@pytest.mark.parametrize(
    ("capability", "decode_context", "refresh"),
    [("9.0", 1, Refresh.IN_GRAPH), ("8.0", 1, Refresh.IN_GRAPH), ("9.0", 2, Refresh.HOST), ("7.5", 1, Refresh.HOST)],
)
def test_refresh_by_hardware(machine, layers, capability, decode_context, refresh):
    where = layers(decode_context=decode_context), machine(capability)
    assert BACKEND.refresh(Role.DRAFT_DECODE, *where) is refresh


@pytest.mark.parametrize(
    ("capability", "changes", "says"),
    [
        ("9.0", {}, "at most splits 32 * min(tokens 16, 512) * heads 32 * (width 128 + 1) * 4 bytes"),
        ("9.0", {"latent": LATENT}, "heads 32 * (width 512 + 1) * 4 bytes"),
        ("10.0", {}, "0: the KV is not split, or there is no full graph"),
        ("7.5", {}, "0: the KV is not split, or there is no full graph"),
    ],
)
def test_workspace_is_zero_and_states_the_bytes_in_the_pool(machine, layers, graph, capability, changes, says):
    piecewise = Entry(mode=GraphMode.PIECEWISE, num_tokens=512)
    where = layers(**changes), machine(capability, THREE) if capability == "9.0" else machine(capability)
    need = BACKEND.workspace(Role.TARGET, *where, [graph(16), piecewise], LIMITS)
    assert (need.device, need.pinned) == (0, 0)
    assert says in need.formula
    assert "no full graph" in BACKEND.workspace(Role.TARGET, *where, [piecewise], LIMITS).formula


def test_padding_declares_nothing_without_a_library(machine, layers):
    assert BACKEND.padding(Role.TARGET, layers(), machine("9.0", {})) == PaddingContract()
