"""The Triton backend on a GPU: in CUDA graphs, at sizes that a model has, against float32.

``python tests/gpu/test_triton.py`` prints what a decode costs.
"""

import math
import os
import statistics

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.plugins.backend import NULL_PAGE, LayerCache, Metadata, Reservation, Scoring
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import DataType
from capture_planner.records.spec import Limits

pytest.importorskip("triton", reason="triton is not installed")
backend = pytest.importorskip("capture_planner_triton", reason="capture-planner-triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("the device is older than SM80", allow_module_level=True)

EXAMPLES = settings(
    max_examples=int(os.environ.get("CAPTURE_PLANNER_GPU_EXAMPLES", "20")),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
MAX_LEN = 2048
DTYPES = {
    DataType.BFLOAT16: (torch.bfloat16, 2e-2),
    DataType.FLOAT16: (torch.float16, 3e-3),
    DataType.FLOAT32: (torch.float32, 1e-4),
}


@attrs.frozen(kw_only=True)
class Setup:
    """A group of layers, one graph of it, and how layers score."""

    heads: tuple[int, int] = (16, 8)
    head_dim: int = 128
    dtype: DataType = DataType.BFLOAT16
    page_size: int = 16
    window: int | None = None
    causal: bool = True
    softcap: float | None = None
    sinks: bool = False
    num_reqs: int
    num_tokens: int
    query_len: int | None
    max_len: int = MAX_LEN

    @property
    def attention(self) -> Attention:
        num_heads, num_kv_heads = self.heads
        return Attention(
            num_layers=1,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            max_model_len=self.max_len,
            max_query_len=self.query_len or 1,
            window=self.window,
            causal=self.causal,
            dtype=self.dtype,
            kv_dtype=self.dtype,
            sinks=self.sinks,
        )

    @property
    def entry(self) -> Entry:
        return Entry(mode=GraphMode.FULL, num_tokens=self.num_tokens, num_reqs=self.num_reqs, query_len=self.query_len)


@st.composite
def setups(draw):
    """Draw a group and a graph of it, uniform or mixed."""
    query_len = draw(st.sampled_from([1, 1, 4, 13, None, None]))
    num_reqs = draw(st.integers(1, 40))
    each = query_len or draw(st.integers(1, 40))
    return Setup(
        heads=draw(st.sampled_from([(16, 8), (32, 8), (8, 8), (14, 2), (24, 8), (64, 1)])),
        head_dim=draw(st.sampled_from([64, 80, 128, 256])),
        dtype=draw(st.sampled_from([DataType.BFLOAT16] * 4 + [DataType.FLOAT16])),
        page_size=draw(st.sampled_from([1, 16, 32, 64])),
        window=draw(st.sampled_from([None, None, 1, 100])),
        causal=draw(st.sampled_from([True, True, False])),
        softcap=draw(st.sampled_from([None, 30.0])),
        sinks=draw(st.booleans()),
        num_reqs=num_reqs,
        num_tokens=num_reqs * each,
        query_len=query_len,
    )


def environment():
    """This device, as a plan would name it."""
    properties = torch.cuda.get_device_properties()
    device = Device(
        kind=DeviceKind.CUDA,
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
    )
    return Environment(name="here", device=device, packages={"triton": "3.6.0"})


class Rig:
    """Buffers, caches and executor of one setup; ``load`` fills them with a batch."""

    def __init__(self, setup: Setup, layers: int = 1, pages: int | None = None) -> None:
        self.setup = setup
        model, where = setup.attention, environment()
        self.dtype, self.tolerance = DTYPES[setup.dtype]
        limits = Limits(max_num_reqs=setup.num_reqs, max_num_tokens=max(setup.num_tokens, setup.num_reqs))
        self.width = -(-setup.max_len // setup.page_size)
        num_pages = 1 + (pages or setup.num_reqs * self.width)
        shape = (num_pages, setup.page_size, model.num_kv_heads, model.head_dim)
        new = {"device": "cuda", "dtype": self.dtype}
        self.caches = {
            layer: LayerCache(keys=torch.empty(shape, **new), values=torch.empty(shape, **new))
            for layer in range(layers)
        }
        self.fields = {
            "query_start_loc": torch.zeros(setup.num_reqs + 1, dtype=torch.int32, device="cuda"),
            "seq_lens": torch.zeros(setup.num_reqs, dtype=torch.int32, device="cuda"),
            "block_table": torch.zeros(setup.num_reqs, self.width, dtype=torch.int32, device="cuda"),
        }
        need = backend.Triton().workspace(Role.TARGET, model, where, (setup.entry,), limits)
        self.workspace = torch.full((need.device,), 255, dtype=torch.uint8, device="cuda")
        self.runs = backend.Triton().reserve(
            Reservation(
                role=Role.TARGET,
                group="all",
                attention=model,
                environment=where,
                entries=(setup.entry,),
                limits=limits,
                caches=self.caches,
                page_size=setup.page_size,
                fields=self.fields,
                workspace=self.workspace,
                pinned=torch.empty(0, dtype=torch.uint8),
                device=torch.device("cuda"),
            )
        )
        rows = (setup.num_tokens, model.num_heads, model.head_dim)
        self.query, self.out = torch.zeros(rows, **new), torch.zeros(rows, **new)
        sinks = torch.randn(model.num_heads, device="cuda") if setup.sinks else None
        self.scoring = Scoring(scale=model.head_dim**-0.5, softcap=setup.softcap, sinks=sinks)
        self.metadata = Metadata(
            entry=setup.entry,
            num_reqs=setup.num_reqs,
            num_tokens=setup.num_tokens,
            max_query_len=setup.query_len or setup.num_tokens,
            max_seq_len=setup.max_len,
            fields=self.fields,
            host={},
        )

    def load(self, queries: list[int], lengths: list[int], seed: int) -> None:
        """Fill everything with a batch; what is not the batch's is NaN."""
        torch.manual_seed(seed)
        setup, count = self.setup, len(queries)
        starts = torch.tensor([0, *queries, *[0] * (setup.num_reqs - count)]).cumsum(0).int()
        seq_lens = torch.tensor([*lengths, *[0] * (setup.num_reqs - count)]).int()
        num_pages = self.caches[0].keys.shape[0]
        table = torch.full((setup.num_reqs, self.width), NULL_PAGE, dtype=torch.int32)
        held = torch.zeros(num_pages * setup.page_size, dtype=torch.bool)
        free = (torch.randperm(num_pages - 1) + 1).tolist()
        for row, (query, length) in enumerate(zip(queries, lengths, strict=True)):
            seen = 0 if setup.window is None else max(length - query - setup.window + 1, 0)
            for index in range(seen // setup.page_size, -(-length // setup.page_size)):
                page = table[row, index] = free.pop()
                first = index * setup.page_size
                end = page * setup.page_size + min(setup.page_size, length - first)
                held[page * setup.page_size : end] = True
        for cache in self.caches.values():
            for tensor in (cache.keys, cache.values):
                tensor.normal_().view(-1, *tensor.shape[2:])[~held.cuda()] = math.nan
        self.query.normal_()[sum(queries) :] = math.nan
        self.out.fill_(math.nan)
        self.workspace.fill_(255)
        for name, value in (("query_start_loc", starts), ("seq_lens", seq_lens), ("block_table", table)):
            self.fields[name].copy_(value)

    def attend(self) -> None:
        """Run the captured part, over all layers."""
        for layer in self.caches:
            self.runs.attend(layer, self.query, self.out, self.scoring, self.metadata)

    def captured(self) -> torch.cuda.CUDAGraph:
        """Capture it, after a warm-up."""
        self.runs.prepare(self.metadata)
        self.attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self.runs.prepare(self.metadata)
        with torch.cuda.graph(graph):
            self.attend()
        return graph

    def expected(self, queries: list[int], lengths: list[int]) -> torch.Tensor:
        """Attend request by request in float32: ``[real tokens, num_heads, head_dim]``."""
        setup, model = self.setup, self.setup.attention
        cache, rows, first = self.caches[0], [], 0
        for row, (query, length) in enumerate(zip(queries, lengths, strict=True)):
            places = torch.arange(length, device="cuda")
            pages = self.fields["block_table"][row, places // setup.page_size].long()
            positions = torch.arange(length - query, length, device="cuda")[:, None]
            seen = places <= positions if setup.causal else places < length + 0 * positions
            if setup.window is not None:
                seen = seen & (places > positions - setup.window) & (places < positions + setup.window)
            keys, values = (
                tensor[pages, places % setup.page_size].float().where(seen.any(0)[:, None, None], 0)
                for tensor in (cache.keys, cache.values)
            )
            group = model.num_heads // model.num_kv_heads
            keys, values = (tensor.repeat_interleave(group, 1).transpose(0, 1) for tensor in (keys, values))
            scores = self.query[first : first + query].float().transpose(0, 1) @ keys.transpose(1, 2)
            scores = scores * self.scoring.scale
            if setup.softcap is not None:
                scores = setup.softcap * torch.tanh(scores / setup.softcap)
            scores = scores.masked_fill(~seen, -math.inf)
            if self.scoring.sinks is not None:
                sinks = self.scoring.sinks[:, None, None].expand(-1, query, 1)
                weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            rows.append((weights @ values).transpose(0, 1))
            first += query
        return torch.cat(rows)

    def check(self, queries: list[int], lengths: list[int]) -> None:
        """Compare the output with what is expected; padded rows are zeros."""
        real = sum(queries)
        got = self.out[:real].float()
        torch.testing.assert_close(got, self.expected(queries, lengths), rtol=self.tolerance, atol=self.tolerance)
        assert not self.out[real:].any()


@st.composite
def batches(draw, setup):
    """Draw what fits the graph: queries and lengths of its real requests."""
    count = draw(st.integers(1, setup.num_reqs))
    if setup.query_len is not None:
        queries = [setup.query_len] * count
    else:
        queries, left = [], setup.num_tokens
        for _ in range(count):
            queries.append(draw(st.integers(0, min(left, 200)) | st.integers(0, min(left, 2))))
            left -= queries[-1]
        queries[0] += not sum(queries)
    past = st.integers(0, 70) | st.integers(0, MAX_LEN - 200)
    return queries, [query + draw(past) for query in queries]


@EXAMPLES
@given(st.data())
def test_graph_serves_any_batch(data):
    """Captured empty; then large, small and large again, with garbage around the batch."""
    torch.backends.cuda.matmul.allow_tf32 = False
    setup = data.draw(setups())
    rig = Rig(setup)
    graph = rig.captured()
    graph.replay()
    assert not rig.out.any()
    full = [setup.query_len or setup.num_tokens // setup.num_reqs] * setup.num_reqs
    large = (full, [query + 700 for query in full])
    small = ([full[0]], [full[0] + 3])
    for seed, (queries, lengths) in enumerate((large, small, data.draw(batches(setup)), large)):
        rig.load(queries, lengths, seed)
        graph.replay()
        rig.check(queries, lengths)


@EXAMPLES
@given(st.data())
def test_eager_step_equals_the_graph(data):
    """At real extents, where keys are split as far as the workspace goes."""
    setup = data.draw(setups())
    rig = Rig(setup)
    queries, lengths = data.draw(batches(setup))
    rig.load(queries, lengths, 1)
    real, count = sum(queries), len(queries)
    rows = {"query_start_loc": count + 1, "seq_lens": count, "block_table": count}
    eager = attrs.evolve(
        rig.metadata,
        entry=None,
        num_reqs=count,
        num_tokens=real,
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        fields={name: rig.fields[name][:size] for name, size in rows.items()},
    )
    rig.runs.prepare(eager)
    rig.runs.attend(0, rig.query[:real], rig.out[:real], rig.scoring, eager)
    rig.out[real:] = 0
    rig.check(queries, lengths)


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_has_the_precision_of_its_dtype(dtype):
    """A decode and a prompt in one batch."""
    rig = Rig(Setup(dtype=dtype, num_reqs=3, num_tokens=300, query_len=None))
    queries, lengths = [1, 255, 1], [900, 300, 1]
    graph = rig.captured()
    rig.load(queries, lengths, 2)
    graph.replay()
    rig.check(queries, lengths)


def microseconds(num_reqs: int, length: int = 700, layers: int = 8, page_size: int = 16) -> float:
    """Median time of one layer's decode in a graph: 16 heads, 8 KV heads, width 128, bfloat16.

    Layers have caches of their own, as in a model, so that the last one's keys are not at hand.
    """
    pages = num_reqs * -(-length // page_size)
    setup = Setup(num_reqs=num_reqs, num_tokens=num_reqs, query_len=1, page_size=page_size, max_len=4096, window=None)
    rig = Rig(setup, layers=layers, pages=pages)
    rig.load([1] * num_reqs, [length] * num_reqs, 0)
    graph = rig.captured()
    times = []
    for _ in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / layers)
    return statistics.median(times[5:])


if __name__ == "__main__":
    for requests in (1, 8, 32, 64, 256):
        print(f"{requests:4} requests of 700 tokens: {microseconds(requests):7.1f} us a layer")  # noqa: T201
