import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, GraphSupport, Refresh, Role
from capture_planner.records.backend import Attention, PaddingContract
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import DataType, Latent
from capture_planner.records.spec import Limits
from capture_planner_triton import Triton
from capture_planner_triton.geometry import MAX_SPLITS, geometry, partial_bytes

BACKEND = Triton()
LIMITS = Limits(max_num_reqs=256, max_num_tokens=8192)
NEVER, ALWAYS = GraphSupport.NEVER, GraphSupport.ALWAYS


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("name", "level", "says"),
    [
        ("h100", ALWAYS, "NVIDIA H100 80GB HBM3 (SM90)"),
        ("h200", ALWAYS, "SM90"),
        ("b200", ALWAYS, "SM100"),
        ("a100", ALWAYS, "SM80"),
        ("l40s", ALWAYS, "SM89"),
        ("t4", NEVER, "Tesla T4 (SM75): the kernel needs SM80"),
        ("cpu", NEVER, "use the reference backend"),
    ],
)
def test_support_on_shipped_environments(committed, layers, role, name, level, says):
    """Every GPU since SM80 holds any batch, in every role."""
    support = BACKEND.support(role, layers(), committed(name))
    assert support.level is level
    assert says in support.reason


@pytest.mark.parametrize(
    ("packages", "level", "says"),
    [
        ({"triton": "3.6.0"}, ALWAYS, "SM90"),
        ({"torch": "2.11.0"}, ALWAYS, "SM90"),
        ({"torch": "2.13.0", "triton": "3.5.1"}, NEVER, "needs Triton 3.6"),
        ({"torch": "2.10.0"}, NEVER, "neither triton 3.6 nor torch 2.11 is installed"),
        ({}, NEVER, "neither triton 3.6 nor torch 2.11 is installed"),
    ],
)
def test_support_by_versions_of_triton_and_torch(machine, layers, packages, level, says):
    """An environment that names Triton is taken at its word."""
    support = BACKEND.support(Role.TARGET, layers(), machine("9.0", packages))
    assert support.level is level
    assert says in support.reason


@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({"head_dim": 80}, ALWAYS, ""),
        ({"head_dim": 256}, ALWAYS, ""),
        ({"head_dim": 257}, NEVER, "more than 256"),
        ({"num_heads": 128, "num_kv_heads": 1}, ALWAYS, ""),
        ({"num_heads": 129, "num_kv_heads": 1, "head_dim": 64}, NEVER, "129 query heads"),
        ({"num_heads": 128, "num_kv_heads": 1, "head_dim": 256}, NEVER, "65536 bytes, and a tile has 32768"),
        ({"causal": False, "window": 100, "sinks": True}, ALWAYS, ""),
        ({"dtype": DataType.FLOAT32, "kv_dtype": DataType.FLOAT32}, ALWAYS, ""),
        ({"dtype": DataType.FLOAT64, "kv_dtype": DataType.FLOAT64}, NEVER, "activations in float64"),
        ({"dtype": DataType.FLOAT16}, NEVER, "a bfloat16 KV cache under float16"),
        ({"kv_dtype": DataType.FP8}, ALWAYS, ""),
        ({"kv_dtype": DataType.NVFP4}, NEVER, "nvfp4 KV cache"),
        ({"latent": Latent(kv_lora_rank=512, rope_head_dim=64)}, NEVER, "latent attention"),
        ({"decode_context": 2}, NEVER, "2 decode-context ranks"),
    ],
)
def test_support_by_heads_and_cache(machine, layers, changes, level, says):
    """What the kernel does not compute is a reason, and needs no memory."""
    where = layers(**changes), machine("9.0")
    support = BACKEND.support(Role.TARGET, *where)
    assert support.level is level
    assert says in support.reason
    if level is NEVER:
        entry = Entry(mode=GraphMode.FULL, num_tokens=1, num_reqs=1, query_len=1)
        assert BACKEND.workspace(Role.TARGET, *where, [entry], LIMITS).device == 0


def test_fp8_cache_needs_a_device_that_converts_it(machine, layers):
    """SM89 and newer."""
    model = layers(kv_dtype=DataType.FP8)
    levels = {sm: BACKEND.support(Role.TARGET, model, machine(sm)) for sm in ("8.0", "8.6", "8.9", "9.0")}
    assert [each.level for each in levels.values()] == [NEVER, NEVER, ALWAYS, ALWAYS]
    assert "SM89" in levels["8.6"].reason


@pytest.mark.parametrize("role", Role)
def test_backend_needs_only_the_common_fields(machine, layers, role):
    """It declares none of its own, and a draft chain can be one graph."""
    where = layers(), machine("9.0")
    assert BACKEND.padding(role, *where) == PaddingContract()
    assert BACKEND.refresh(role, *where) is Refresh.IN_GRAPH


@pytest.mark.parametrize(
    ("num_reqs", "query_len", "changes", "device"),
    [
        # 32 parts, and no more however empty the device is.
        (1, 1, {}, 32 * 1 * 32 * 129 * 4),
        # 4 * 132 programs over 4 requests of 8 KV heads: 16 parts.
        (4, 1, {}, 16 * 4 * 32 * 129 * 4),
        # 4 query heads in 64 rows are 16 tokens: one tile a request, as for one token.
        (4, 16, {}, 16 * 64 * 32 * 129 * 4),
        # A window of 64 keys reaches over three tiles of 64.
        (1, 1, {"window": 128}, 3 * 1 * 32 * 129 * 4),
        # 128 keys are two tiles.
        (1, 1, {"max_model_len": 128}, 2 * 1 * 32 * 129 * 4),
        (64, 1, {}, 0),
    ],
)
def test_workspace_of_known_graphs(machine, layers, graph, num_reqs, query_len, changes, device):
    """Splits times tokens times heads times (width + 1), in float32, on a device of 132 multiprocessors."""
    where = layers(**changes), machine("9.0")
    found = BACKEND.workspace(Role.TARGET, *where, [graph(num_reqs, query_len)], LIMITS)
    assert (found.device, found.pinned) == (device, 0)


@st.composite
def groups(draw):
    """Draw a group that the kernel takes."""
    kv_heads = draw(st.integers(1, 16))
    return Attention(
        num_layers=1,
        num_heads=kv_heads * draw(st.integers(1, 64)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 256)),
        max_model_len=draw(st.integers(1, 1 << 20)),
        max_query_len=1,
        window=draw(st.none() | st.integers(1, 1 << 12)),
    )


@st.composite
def graphs(draw):
    """Draw a full graph, uniform or mixed."""
    num_reqs = draw(st.integers(1, 512))
    query_len = draw(st.none() | st.integers(1, 9))
    tokens = num_reqs * query_len if query_len else draw(st.integers(num_reqs, 1 << 14))
    return Entry(mode=GraphMode.FULL, num_tokens=tokens, num_reqs=num_reqs, query_len=query_len)


def machine_of(multiprocessors):
    """Make a GPU of so many multiprocessors."""
    device = Device(kind=DeviceKind.CUDA, name="g", capability="9.0", memory=1, multiprocessors=multiprocessors)
    return Environment(name="e", device=device, packages={"triton": "3.6.0"})


@given(groups(), st.lists(graphs(), min_size=1, max_size=5), st.integers(1, 200))
def test_workspace_fits_the_largest_graph_exactly(model, entries, multiprocessors):
    """It is what the largest need alone is; a step that is given it splits as the plan says."""
    where = machine_of(multiprocessors)
    found = BACKEND.workspace(Role.TARGET, model, where, entries, LIMITS)
    alone = [BACKEND.workspace(Role.TARGET, model, where, [entry], LIMITS).device for entry in entries]
    assert found.device == max(alone)
    piecewise = Entry(mode=GraphMode.PIECEWISE, num_tokens=1 << 14)
    assert BACKEND.workspace(Role.TARGET, model, where, [piecewise, *entries], LIMITS) == found
    for entry in entries:
        step = {
            "num_reqs": entry.num_reqs,
            "num_tokens": entry.num_tokens,
            "query_len": entry.query_len,
            "max_seq_len": model.max_model_len,
        }
        planned = geometry(model, multiprocessors, **step)
        assert geometry(model, multiprocessors, workspace=found.device, **step) == planned
        assert planned.splits == 1 or partial_bytes(model, entry.num_tokens, planned.splits) <= found.device


def test_workspace_is_zero_without_full_graphs(machine, layers):
    """The reason is in the formula."""
    found = BACKEND.workspace(Role.TARGET, layers(), machine("9.0"), [], LIMITS)
    assert found.device == 0
    assert "no full graph" in found.formula


@given(groups(), graphs(), st.integers(1, 200), st.data())
def test_grid_reaches_every_token_of_every_batch(model, entry, multiprocessors, data):
    """Each request finds its tiles inside the grid, and no two requests share one."""
    cut = geometry(
        model,
        multiprocessors,
        num_reqs=entry.num_reqs,
        num_tokens=entry.num_tokens,
        query_len=entry.query_len,
        max_seq_len=model.max_model_len,
    )
    group = model.num_heads // model.num_kv_heads
    assert group <= cut.rows
    assert cut.queries * group <= cut.rows
    assert all(size & (size - 1) == 0 and size >= 16 for size in (cut.rows, cut.keys, cut.width))
    assert model.head_dim <= cut.width
    assert 1 <= cut.splits <= MAX_SPLITS
    # Blocks partition the tokens a second time: padded rows are zeroed by them.
    assert cut.blocks * cut.queries >= entry.num_tokens
    if entry.query_len is not None:
        assert cut.blocks_each * cut.queries >= entry.query_len
        assert cut.blocks == entry.num_reqs * cut.blocks_each
    else:
        assert cut.blocks_each is None
        start = after = 0
        for request in range(min(entry.num_reqs, 20)):
            query = data.draw(st.integers(0, entry.num_tokens - start))
            first = start // cut.queries + request
            assert first >= after
            after = first + -(-query // cut.queries)
            assert after <= cut.blocks
            start += query


@given(groups(), graphs(), st.integers(1, 200), st.integers(0, 1 << 20))
def test_splits_shrink_with_the_workspace(model, entry, multiprocessors, room):
    """An eager step takes as many parts as fit, and never more than it has use for."""
    step = {
        "num_reqs": entry.num_reqs,
        "num_tokens": entry.num_tokens,
        "query_len": entry.query_len,
        "max_seq_len": model.max_model_len,
    }
    wanted = geometry(model, multiprocessors, **step)
    given = geometry(model, multiprocessors, workspace=room, **step)
    assert attrs.evolve(given, splits=wanted.splits) == wanted
    fitting = [n for n in range(2, wanted.splits + 1) if partial_bytes(model, entry.num_tokens, n) <= room]
    assert given.splits == max(fitting, default=1)
