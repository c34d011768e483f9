"""A rig for FlashInfer's executor: what a runner gives it, graphs, and what is checked on any of them.

The tests on a GPU run these checks on FlashInfer, those in tests/backends on a stand-in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.plugins.backend import LayerCache, Metadata, Reservation, Scoring
from capture_planner.records.backend import COMMON_FIELDS, Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.spec import Limits
from capture_planner_flashinfer import FlashInfer
from capture_planner_flashinfer.selection import kernel_family
from capture_planner_runner.execution import padding
from capture_planner_runner.execution.fields import Extents, Fields
from capture_planner_runner.execution.inputs import DERIVED, StepInputs

REQS, LENGTH, TOKENS, LAYER = 8, 640, 2048, 3
ROLE, GROUP, BACKEND = Role.TARGET, "full", FlashInfer()

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures a forward and returns its replay."""
Steps = list[tuple[list[int], int]]
"""Batches of decodes: the length of each request, and a seed for everything else."""


@attrs.frozen(kw_only=True)
class Setting:
    """What is planned and compiled."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    query_len: int = 1
    window: int | None = None
    softcap: float | None = None
    capability: str | None = "8.0"
    """What is planned for; None: the device at hand."""

    def __str__(self) -> str:
        text = f"{self.heads // self.kv_heads}x{self.kv_heads}-d{self.head_dim}-p{self.page_size}"
        text += f"-q{self.query_len}-{self.capability or 'device'}"
        text += "" if self.window is None else f"-w{self.window}"
        return text + ("" if self.softcap is None else f"-cap{self.softcap:g}")


def environment(setting: Setting, device: torch.device) -> Environment:
    """Return the machine that a setting is planned for."""
    real, version = device.type == "cuda", "0.6.9"
    if real:
        version = metadata.version("flashinfer-python")
    capability = setting.capability or ".".join(map(str, torch.cuda.get_device_capability()))
    return Environment(
        name="here",
        device=Device(
            kind=DeviceKind.CUDA,
            name="GPU",
            capability=capability,
            memory=80 << 30,
            multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count if real else 132,
        ),
        packages={"flashinfer-python": version},
    )


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """One batch, with what attention must make of it."""

    queries: list[int]
    query: torch.Tensor
    """``[tokens, heads, head_dim]``, without padding."""
    expected: torch.Tensor
    """The same in float32."""
    values: dict[str, np.ndarray[Any, Any]]


class Rig:
    """An executor with everything that a runner gives it, and graphs of its attention."""

    def __init__(self, setting: Setting, device: torch.device, capture: Capture) -> None:
        self.setting, self.device, self._capture = setting, device, capture
        planned = environment(setting, device)
        attention = Attention(
            num_layers=1,
            num_heads=setting.heads,
            num_kv_heads=setting.kv_heads,
            head_dim=setting.head_dim,
            max_model_len=LENGTH,
            max_query_len=setting.query_len,
            window=setting.window,
        )
        self.family = kernel_family(attention, planned)
        self.entries = tuple(_entry(reqs, setting.query_len) for reqs in (REQS, REQS // 2))
        limits = Limits(max_num_reqs=REQS, max_num_tokens=TOKENS)
        self._contract = BACKEND.padding(ROLE, attention, planned)
        need = BACKEND.workspace(ROLE, attention, planned, self.entries, limits)
        pages = -(-LENGTH // setting.page_size)
        self._capacity = Extents(tokens=TOKENS, reqs=REQS, pages=pages)
        role: Any = SimpleNamespace(inputs=COMMON_FIELDS, groups=(SimpleNamespace(name=GROUP, padding=self._contract),))
        self.fields = Fields(role, self._capacity, device)
        shape = (REQS * pages + 1, setting.page_size, setting.kv_heads, setting.head_dim)
        self.cache = LayerCache(
            keys=torch.zeros(shape, dtype=torch.bfloat16, device=device),
            values=torch.zeros(shape, dtype=torch.bfloat16, device=device),
        )
        self.workspace = torch.zeros(need.device, dtype=torch.uint8, device=device)
        self.pinned = torch.zeros(need.pinned, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.scoring = Scoring(scale=0.75 * setting.head_dim**-0.5, softcap=setting.softcap)
        self.executor = BACKEND.reserve(
            Reservation(
                role=ROLE,
                group=GROUP,
                attention=attention,
                environment=planned,
                entries=self.entries,
                limits=limits,
                caches={LAYER: self.cache},
                page_size=setting.page_size,
                fields={name: buffer.tensor for name, buffer in self.fields.by_group[GROUP].items()},
                workspace=self.workspace,
                pinned=self.pinned,
                device=device,
            )
        )
        self._graphs = {entry: self._captured(entry) for entry in self.entries}

    def stage(self, entry: Entry | None, values: dict[str, np.ndarray[Any, Any]]) -> Metadata:
        """Fill and pad the fields of a step, and let the executor prepare."""
        values = dict(values)
        names = {field.name for field in self._contract.fields}
        starts = values["query_start_loc"]
        tokens, reqs = int(starts[-1]), len(starts) - 1
        inputs = StepInputs(
            **values,
            input_ids=None,
            positions=np.zeros(tokens, dtype=np.int64),
            slot_mapping=None,
            idx_mapping=np.arange(reqs, dtype=np.int32),
            page_size=self.setting.page_size,
        )
        values |= {name: DERIVED[name](inputs) for name in names & set(DERIVED)}
        padding.apply(padding.table(self.fields, values, tokens))
        extents = Extents(tokens=tokens, reqs=reqs, pages=self._capacity.pages)
        if entry is not None:
            extents = attrs.evolve(extents, tokens=entry.num_tokens, reqs=entry.num_reqs or 0)
        views = self.fields.views(GROUP, extents)
        metadata = Metadata(
            entry=entry,
            num_reqs=extents.reqs,
            num_tokens=extents.tokens,
            max_query_len=int(np.diff(starts).max()) if entry is None else entry.query_len or 1,
            max_seq_len=int(values["seq_lens"].max()) if entry is None else LENGTH,
            fields=views,
            host={name: view.cpu().numpy() for name, view in views.items()},
        )
        self.executor.prepare(metadata)
        return metadata

    def _captured(self, entry: Entry) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor, Any]:
        shape = (entry.num_tokens, self.setting.heads, self.setting.head_dim)
        query = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        out = torch.empty_like(query)
        reqs, query_len = entry.num_reqs or 0, entry.query_len or 0
        warm = {
            "query_start_loc": np.arange(reqs + 1, dtype=np.int32) * np.int32(query_len),
            "seq_lens": np.full(reqs, query_len, dtype=np.int32),
            "block_table": np.zeros((reqs, 1), dtype=np.int32),
        }
        metadata = self.stage(entry, warm)
        self.executor.attend(LAYER, query, out, self.scoring, metadata)
        metadata = self.stage(entry, warm)
        replay = self._capture(lambda: self.executor.attend(LAYER, query, out, self.scoring, metadata))
        return replay, query, out, self.executor.layout()

    def batch(self, lengths: Sequence[int], queries: Sequence[int], seed: int, tail: float) -> Batch:
        """Put random requests into shuffled pages; all other pages are NaN, the null page too.

        ``tail`` is what the rest of each last page holds.
        """
        setting, draw = self.setting, np.random.default_rng(seed)
        random = torch.Generator(self.device).manual_seed(seed)
        free = iter(draw.permutation(np.arange(1, len(self.cache.keys))).tolist())
        table = np.zeros((len(lengths), self._capacity.pages), dtype=np.int32)
        for tensor in (self.cache.keys, self.cache.values):
            tensor.fill_(torch.nan)
        asked, expected = [], []
        for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
            used = [next(free) for _ in range(-(-length // setting.page_size))]
            table[row, : len(used)] = used
            sides = []
            for tensor in (self.cache.keys, self.cache.values):
                shape = (len(used) * setting.page_size, setting.kv_heads, setting.head_dim)
                made = torch.randn(shape, generator=random, device=self.device).to(tensor.dtype)
                made[length:] = tail
                tensor[torch.tensor(used, device=self.device)] = made.view(len(used), *tensor.shape[1:])
                sides.append(made[:length])
            shape = (count, setting.heads, setting.head_dim)
            query = torch.randn(shape, generator=random, device=self.device).to(torch.bfloat16)
            asked.append(query)
            expected.append(dense(query, sides[0], sides[1], self.scoring, setting.window))
        starts = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(queries, out=starts[1:])
        values = {"query_start_loc": starts, "seq_lens": np.asarray(lengths, dtype=np.int32), "block_table": table}
        return Batch(queries=list(queries), query=torch.cat(asked), expected=torch.cat(expected), values=values)

    def replay(self, entry: Entry, batch: Batch) -> None:
        """Replay an entry's graph for a batch, and compare: real rows, padding, layout."""
        replay, query, out, layout = self._graphs[entry]
        self.stage(entry, batch.values)
        assert self.executor.layout() == layout, "a graph would run on another plan layout"
        real = len(batch.query)
        query.fill_(torch.nan)
        query[:real] = batch.query
        out.fill_(torch.nan)
        replay()
        close(out[:real], batch.expected)
        if self.family.is_wrapper:
            assert not out[real:].any(), "padded rows are not zero"

    def eager(self, batch: Batch) -> None:
        """Run a batch without a graph, and compare."""
        metadata = self.stage(None, batch.values)
        out = torch.full_like(batch.query, torch.nan)
        self.executor.attend(LAYER, batch.query, out, self.scoring, metadata)
        close(out, batch.expected)

    def poison(self) -> None:
        """Overwrite what a step may not depend on."""
        self.fields.poison()
        self.workspace.fill_(255)


def dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, window: int | None
) -> torch.Tensor:
    """Attend causally in float32, one request: query ``[q, heads, dim]``, keys ``[L, kv_heads, dim]``."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.float().repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    places = torch.arange(len(keys), device=query.device)
    own = places[len(keys) - len(query) :, None]
    hidden = places > own
    if window is not None:
        hidden = hidden | (places <= own - window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with what bfloat16 weights and outputs leave."""
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


def _entry(reqs: int, query_len: int) -> Entry:
    return Entry(mode=GraphMode.FULL, num_tokens=reqs * query_len, num_reqs=reqs, query_len=query_len)


# What is checked, on any rig.


def check_replays(rig: Rig, steps: Steps, tail: float = 1e3) -> None:
    """Replay each batch in the smallest graph that holds it, and in the largest."""
    for lengths, seed in steps:
        lengths = [max(length, rig.setting.query_len) for length in lengths]
        batch = rig.batch(lengths, [rig.setting.query_len] * len(lengths), seed, tail)
        for entry in rig.entries:
            if len(lengths) <= (entry.num_reqs or 0):
                rig.replay(entry, batch)


def check_poisoned(rig: Rig, steps: Steps) -> None:
    """Replay batches after fields and workspace were overwritten, the same batch twice."""
    for lengths, seed in steps:
        for _ in range(2):
            rig.poison()
            check_replays(rig, [(lengths, seed)])


def check_eager(rig: Rig, requests: Sequence[tuple[int, int]], seed: int) -> None:
    """Run prompts and decodes of any query length without a graph, then a graph."""
    lengths = [context + count for context, count in requests]
    batch = rig.batch(lengths, [count for _, count in requests], seed, tail=1e3)
    rig.eager(batch)
    assert rig.executor.layout() is None
    check_replays(rig, [(lengths[: REQS // 2], seed)])


def check_plan_counts(rig: Rig) -> None:
    """Plan for a graph where page counts change, and only there."""
    executor: Any = rig.executor
    setting = rig.setting
    entry = rig.entries[0]

    def plans(lengths: list[int]) -> int:
        before: int = executor.plans
        rig.replay(entry, rig.batch(lengths, [setting.query_len] * len(lengths), 7, 1e3))
        made: int = executor.plans - before
        return made

    start, needed = 2 * setting.page_size + setting.query_len, int(rig.family.is_wrapper)
    assert plans([start, start]) == needed
    assert plans([start + 1, start]) == 0, "no page count changed"
    assert plans([start, start + 2]) == 0, "no page count changed"
    assert plans([start + setting.page_size, start]) == needed
    assert plans([start + setting.page_size, start, start]) == needed
    rig.workspace.add_(0)
    assert plans([start + setting.page_size, start, start]) == needed, "the plan may be gone"


lengths_of = functools.partial(st.lists, st.integers(1, LENGTH))
seeds = st.integers(0, 1 << 16)


@st.composite
def changes(draw: st.DrawFn) -> Steps:
    """Draw batches that go from large to small, at most half of a graph, and back."""
    sizes = (REQS, draw(st.integers(1, REQS // 2)), draw(st.integers(REQS // 2, REQS)))
    return [(draw(lengths_of(min_size=size, max_size=size)), draw(seeds)) for size in sizes]


mixed = st.lists(
    st.tuples(st.integers(0, LENGTH - 200), st.sampled_from([1, 2, 7, 64, 129, 200])), min_size=1, max_size=REQS
)
