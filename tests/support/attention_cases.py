"""Batches for tests of attention kernels, in memory full of garbage, with a loop over tokens as the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.plugins.backend import NULL_PAGE, LayerCache, Metadata, Reservation, Scoring
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.spec import Limits
from capture_planner_reference import Reference

ENVIRONMENT = Environment(name="e", device=Device(kind=DeviceKind.CPU, name="c", memory=1))
LAYER, OTHER = 4, 1
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
DTYPES = st.sampled_from(list(TOLERANCE))


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """One batch of requests: its lengths, pages and scoring, and the extents of a graph that holds it."""

    attention: Attention
    dtype: torch.dtype
    page_size: int
    lengths: list[int]
    queries: list[int]
    tables: list[list[int]]
    used: np.ndarray[Any, Any]
    """``bool[pages, page_size]``: the slots that a query may see."""
    query_len: int | None
    max_query_len: int | None
    """The most tokens of a request, where they vary up to it."""
    num_reqs: int
    num_tokens: int
    pages: int
    """Width of the block table."""
    scale: float
    softcap: float | None
    sinks: float | None
    """Standard deviation of the sinks; None: no sinks."""
    seed: int

    @property
    def real(self) -> int:
        """Tokens of all requests."""
        return sum(self.queries)

    def exact(self) -> Case:
        """The same batch without padding, but for what requests have fewer tokens than a varying graph."""
        pages, reqs = max(1, *map(len, self.tables)), len(self.lengths)
        tokens = reqs * self.max_query_len if self.max_query_len else max(self.real, 1)
        return attrs.evolve(self, num_reqs=reqs, num_tokens=tokens, pages=pages)


@st.composite
def cases(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype] = DTYPES) -> Case:
    """Draw a batch: uniform, varying or mixed, with shared, shuffled and freed pages, padded on each axis."""
    page_size = draw(st.integers(1, 16))
    query_len = draw(st.none() | st.integers(1, 4))
    num_reqs = draw(st.integers(1, 4))
    varies = query_len is not None and draw(st.booleans())
    query = st.integers(0, 5) if query_len is None else st.integers(1 if varies else query_len, query_len)
    queries = [draw(query) for _ in range(num_reqs)]
    lengths = [q + draw(st.integers(0, 20)) for q in queries]
    window, causal = draw(st.none() | st.integers(1, 9)), draw(st.booleans())
    needed = [-(-length // page_size) for length in lengths]
    num_pages = 1 + sum(needed) + draw(st.integers(0, 3))
    free = draw(st.permutations(range(1, num_pages)))
    tables, used = [], np.zeros((num_pages, page_size), bool)
    full: list[int] = []
    share, freed = draw(st.booleans()), draw(st.booleans())
    for length, q, count in zip(lengths, queries, needed, strict=True):
        table = []
        for index in range(count):
            whole = (index + 1) * page_size <= length
            first_seen = 0 if window is None else length - q - window + 1
            if freed and (index + 1) * page_size <= first_seen:
                table.append(NULL_PAGE)
                continue
            shared = share and whole and full and draw(st.booleans())
            page = draw(st.sampled_from(full)) if shared else free.pop()
            if whole:
                full.append(page)
            used[page, : min(page_size, length - index * page_size)] = True
            table.append(page)
        tables.append(table)
    padded = num_reqs + draw(st.integers(0, 3))
    if query_len is None:
        num_tokens = max(sum(queries), 1) + draw(st.integers(0, 5))
    elif varies:
        num_tokens = padded * query_len
    else:
        # A hand-written plan may have fewer tokens than its requests could have.
        num_tokens = padded * query_len - draw(st.just(0) | st.integers(0, (padded - num_reqs) * query_len))
    kv_heads, heads_each = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Case(
        attention=Attention(
            num_layers=2,
            num_heads=kv_heads * heads_each,
            num_kv_heads=kv_heads,
            head_dim=draw(st.integers(1, 8)),
            max_model_len=64,
            max_query_len=query_len or 1,
            window=window,
            causal=causal,
        ),
        dtype=draw(dtypes),
        page_size=page_size,
        lengths=lengths,
        queries=queries,
        tables=tables,
        used=used,
        query_len=None if varies else query_len,
        max_query_len=query_len if varies else None,
        num_reqs=padded,
        num_tokens=num_tokens,
        pages=max(1, *needed) + draw(st.integers(0, 2)),
        scale=draw(st.sampled_from([0.125, 1.0, 3.0])),
        softcap=draw(st.sampled_from([None, 0.5, 5.0])),
        sinks=draw(st.sampled_from([None, 1.0, 500.0])),
        seed=draw(st.integers(0, 1 << 16)),
    )


class UnreadableHost(Mapping[str, Any]):
    """Host values of a captured step, where reading one would bake it into the graph."""

    def __getitem__(self, name: str) -> Any:
        raise AssertionError(f"the host's {name} was read for a FULL graph")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the host's values were read for a FULL graph")

    def __len__(self) -> int:
        raise AssertionError("the host's values were read for a FULL graph")


class Rig:
    """A case in memory: everything outside the batch holds garbage."""

    def __init__(self, case: Case, garbage: int = 0, device: str = "cpu") -> None:
        self.case = case
        rng, junk = np.random.default_rng(case.seed), np.random.default_rng(garbage)
        attention = case.attention

        def put(real: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> torch.Tensor:
            wrong = junk.choice([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0], real.shape)
            mask = mask.reshape(mask.shape + (1,) * (real.ndim - mask.ndim))
            return torch.from_numpy(np.where(mask, real, wrong)).to(device, case.dtype)

        cells = (*case.used.shape, attention.num_kv_heads, attention.head_dim)
        self.keys, self.values = (put(rng.standard_normal(cells), case.used) for _ in "kv")
        nothing = np.zeros_like(case.used)
        other = LayerCache(keys=put(np.zeros(cells), nothing), values=put(np.zeros(cells), nothing))
        rows = (case.num_tokens, attention.num_heads, attention.head_dim)
        real = np.zeros(rows)
        real[: case.real] = rng.standard_normal((case.real, *rows[1:]))
        self.query = put(real, np.arange(case.num_tokens) < case.real)
        sinks = None
        if case.sinks is not None:
            sinks = put(case.sinks * rng.standard_normal(attention.num_heads), np.array(True))
        self.scoring = Scoring(scale=case.scale, softcap=case.softcap, sinks=sinks)
        count, padding = len(case.lengths), case.num_reqs - len(case.lengths)
        table = np.zeros((case.num_reqs, case.pages), np.int32)
        table[:count] = junk.integers(0, len(case.used), (count, case.pages))
        for row, pages in zip(table, case.tables, strict=False):
            row[: len(pages)] = pages
        starts = np.cumsum([0, *case.queries, *[0] * padding]).astype(np.int32)
        self.host = {
            "query_start_loc": starts,
            "seq_lens": np.array([*case.lengths, *[0] * padding], np.int32),
            "block_table": table,
        }
        self.fields = {name: torch.from_numpy(value).to(device) for name, value in self.host.items()}
        self.caches = {OTHER: other, LAYER: LayerCache(keys=self.keys, values=self.values)}
        self.reservation = Reservation(
            role=Role.TARGET,
            group="all",
            attention=attention,
            environment=ENVIRONMENT,
            entries=(self.entry,),
            limits=Limits(max_num_reqs=case.num_reqs, max_num_tokens=case.num_tokens),
            caches=self.caches,
            page_size=case.page_size,
            fields=self.fields,
            workspace=torch.empty(0, dtype=torch.uint8),
            pinned=torch.empty(0, dtype=torch.uint8),
            device=torch.device(device),
        )

    @property
    def entry(self) -> Entry:
        """The graph of the case."""
        case = self.case
        return Entry(
            mode=GraphMode.FULL,
            num_tokens=case.num_tokens,
            num_reqs=case.num_reqs,
            query_len=case.query_len,
            max_query_len=case.max_query_len,
        )

    @property
    def padded(self) -> Metadata:
        """Return the metadata of a FULL graph."""
        return Metadata(
            entry=self.entry,
            num_reqs=self.case.num_reqs,
            num_tokens=self.case.num_tokens,
            max_query_len=self.entry.tokens_each or self.case.num_tokens,
            max_seq_len=max(self.case.lengths),
            fields=self.fields,
            host=UnreadableHost(),
        )

    def unpadded(self, entry: Entry | None = None) -> Metadata:
        """Return the metadata of an eager step, or between the pieces of a PIECEWISE graph."""
        num_reqs = len(self.case.lengths)
        cut = {"query_start_loc": num_reqs + 1, "seq_lens": num_reqs, "block_table": num_reqs}
        return Metadata(
            entry=entry,
            num_reqs=num_reqs,
            num_tokens=self.case.real,
            max_query_len=max(self.case.queries),
            max_seq_len=max(self.case.lengths),
            fields={name: self.fields[name][:rows] for name, rows in cut.items()},
            host=self.host,
        )

    def run(self, metadata: Metadata) -> torch.Tensor:
        """Reserve, prepare and attend; the output starts as NaN."""
        runs = Reference().reserve(self.reservation)
        runs.prepare(metadata)
        query = self.query[: metadata.num_tokens]
        out = torch.full_like(query, math.nan)
        runs.attend(LAYER, query, out, self.scoring, metadata)
        return out

    def expected(self) -> torch.Tensor:
        """``float64[real tokens, num_heads, head_dim]``, one token and one head at a time."""
        case, attention = self.case, self.case.attention
        query, keys, values = (t.double().numpy() for t in (self.query, self.keys, self.values))
        sinks = None if self.scoring.sinks is None else self.scoring.sinks.double().numpy()
        rows: list[np.ndarray] = []
        for length, q, table in zip(case.lengths, case.queries, case.tables, strict=True):
            for position in range(length - q, length):
                seen: Sequence[int] = range(position + 1 if attention.causal else length)
                if attention.window is not None:
                    seen = [key for key in seen if abs(position - key) < attention.window]
                places = [(table[key // case.page_size], key % case.page_size) for key in seen]
                for head in range(attention.num_heads):
                    kv_head = head * attention.num_kv_heads // attention.num_heads
                    vector = query[len(rows) // attention.num_heads, head]
                    scores = [case.scale * float(vector @ keys[*place, kv_head]) for place in places]
                    if case.softcap is not None:
                        scores = [case.softcap * math.tanh(score / case.softcap) for score in scores]
                    logits = scores if sinks is None else [*scores, float(sinks[head])]
                    total = sum(math.exp(score - max(logits)) for score in logits)
                    weights = [math.exp(score - max(logits)) / total for score in scores]
                    rows.append(sum(w * values[*place, kv_head] for w, place in zip(weights, places, strict=True)))
        shape = (case.real, attention.num_heads, attention.head_dim)
        return torch.tensor(np.array(rows), dtype=torch.float64).reshape(shape)


def assert_close(case: Case, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with a tolerance for the dtype of the case."""
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)
