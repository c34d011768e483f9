"""The flash_attention executor over stand-in libraries, against the reference backend."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.plugins.backend import LayerCache, Metadata, Reservation, Scoring
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.spec import Limits
from capture_planner_flash_attention import FlashAttention, libraries
from capture_planner_flash_attention.libraries import num_splits
from capture_planner_reference import Reference
from support.flash_attention_standin import installed

LAYER = 3
VERSIONS = {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0b36", "torch": "2.13.0"}
LIBRARIES = st.sampled_from(libraries.LIBRARIES)
MAX_LEN = 600


def environment(library: libraries.Library, multiprocessors: int = 132) -> Environment:
    """Make an H100 with one library."""
    h100 = {"kind": DeviceKind.CUDA, "name": "H100", "capability": "9.0", "memory": 1}
    device = Device(**h100, multiprocessors=multiprocessors)
    return Environment(name="e", device=device, packages={library.package: VERSIONS[library.package]})


@attrs.define(kw_only=True, eq=False)
class World:
    """One group on one library: caches, and the fields of a role at full capacity."""

    library: libraries.Library
    entry: Entry
    attention: Attention
    page_size: int
    scoring: Scoring
    role: Role = Role.TARGET
    seed: int = 0
    reservation: Reservation = attrs.field(init=False)
    query: torch.Tensor = attrs.field(init=False)
    out: torch.Tensor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        made = torch.Generator().manual_seed(self.seed)
        reqs, pages = self.entry.num_reqs or 0, -(-MAX_LEN // self.page_size)
        shape = (1 + reqs * pages, self.page_size, self.attention.num_kv_heads, self.attention.head_dim)
        keys, values = (torch.randn(shape, generator=made).bfloat16() for _ in "kv")
        keys[0] = values[0] = math.nan
        fields = {
            "query_start_loc": torch.zeros(reqs + 1, dtype=torch.int32),
            "seq_lens": torch.zeros(reqs, dtype=torch.int32),
            "block_table": torch.zeros(reqs, pages, dtype=torch.int32),
        }
        if self.library is libraries.FA3 and self.role is not Role.DRAFT_DECODE:
            fields["scheduler_metadata"] = torch.zeros(1 + 4 * -(-reqs // 4) * 4, dtype=torch.int32)
        rows = (self.entry.num_tokens, self.attention.num_heads, self.attention.head_dim)
        self.query = torch.randn(rows, generator=made).bfloat16()
        self.out = torch.full_like(self.query, math.nan)
        self.reservation = Reservation(
            role=self.role,
            group="all",
            attention=self.attention,
            environment=environment(self.library),
            entries=(self.entry,),
            limits=Limits(max_num_reqs=reqs, max_num_tokens=self.entry.num_tokens),
            caches={LAYER: LayerCache(keys=keys, values=values)},
            page_size=self.page_size,
            fields=fields,
            workspace=torch.empty(0, dtype=torch.uint8),
            pinned=torch.empty(0, dtype=torch.uint8),
            device=torch.device("cpu"),
        )

    def step(self, queries: list[int], lengths: list[int], seed: int, *, full: bool) -> Metadata:
        """Fill and pad the fields for one batch, and give the metadata of its step."""
        rng, fields = np.random.default_rng(seed), self.reservation.fields
        reqs, pages = fields["block_table"].shape
        real = len(queries)
        starts = np.cumsum([0, *queries, *[0] * (reqs - real)])
        table = np.zeros((reqs, pages), np.int64)
        table[:real] = 1 + rng.permutation(reqs * pages)[: real * pages].reshape(real, pages)
        host = {"query_start_loc": starts, "seq_lens": np.array([*lengths, *[0] * (reqs - real)]), "block_table": table}
        for name, value in host.items():
            fields[name].copy_(torch.from_numpy(value))
        if "scheduler_metadata" in fields:
            fields["scheduler_metadata"].fill_(-7)
        cut = {"query_start_loc": real + 1, "seq_lens": real, "block_table": real}
        seen = {name: value[: cut[name]] for name, value in host.items()}
        uniform = self.entry.query_len
        return Metadata(
            entry=self.entry if full else None,
            num_reqs=reqs if full else real,
            num_tokens=self.entry.num_tokens if full else sum(queries),
            max_query_len=(uniform or self.entry.num_tokens) if full else max(queries),
            max_seq_len=MAX_LEN if full else max(lengths),
            fields=fields if full else {name: fields[name][:rows] for name, rows in cut.items()},
            host=host if full else seen,
        )

    def run(self, runs: Any, metadata: Metadata) -> torch.Tensor:
        """Prepare and attend; the output starts as NaN."""
        rows = slice(metadata.num_tokens)
        self.out.fill_(math.nan)
        runs.prepare(metadata)
        if metadata.is_full:
            # Who reads a host value where it is captured bakes it in.
            metadata = attrs.evolve(metadata, host={})
        runs.attend(LAYER, self.query[rows], self.out[rows], self.scoring, metadata)
        return self.out[rows].clone()


@st.composite
def worlds(draw: st.DrawFn, choices: st.SearchStrategy[libraries.Library] = LIBRARIES) -> World:
    """Draw a group: any library, heads, mask and scoring that it takes, and one graph."""
    library = draw(choices)
    query_len = draw(st.sampled_from([None, 1, 2, 4]))
    reqs, kv_heads = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    tokens = reqs * query_len if query_len else reqs + draw(st.integers(0, 12))
    mixes = library in (libraries.FA3, libraries.FA4)
    return World(
        library=library,
        entry=Entry(mode=GraphMode.FULL, num_tokens=tokens, num_reqs=reqs, query_len=query_len),
        attention=Attention(
            num_layers=1,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=8,
            max_model_len=MAX_LEN,
            max_query_len=query_len or 1,
            window=draw(st.none() | st.integers(1, 40)),
            causal=draw(st.booleans()),
            sinks=mixes and draw(st.booleans()),
        ),
        page_size=draw(st.sampled_from([16, 64, 128])) if mixes else 256,
        scoring=Scoring(
            scale=draw(st.sampled_from([0.35, 1.0])),
            softcap=draw(st.sampled_from([None, 3.0])) if library is not libraries.TORCH else None,
            sinks=draw(st.none() | st.just(torch.linspace(1, 6, heads))) if mixes else None,
        ),
        role=draw(st.sampled_from([Role.TARGET, Role.DRAFT_DECODE])),
        seed=draw(st.integers(0, 1 << 16)),
    )


def batches(world: World) -> st.SearchStrategy[tuple[list[int], list[int], int]]:
    """Draw query lengths, sequence lengths and a seed that the world's graph holds."""
    entry = world.entry

    @st.composite
    def batch(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
        queries: list[int] = []
        for _ in range(draw(st.integers(1, entry.num_reqs or 1))):
            room = entry.num_tokens - sum(queries)
            if room < (entry.query_len or 1):
                break
            queries.append(entry.query_len or draw(st.integers(1, room)))
        lengths = [q + draw(st.integers(0, 40) | st.integers(0, MAX_LEN - q)) for q in queries]
        return queries, lengths, draw(st.integers(0, 1 << 16))

    return batch()


@given(st.data(), worlds(), st.booleans())
def test_every_library_equals_the_reference(data, world, full):
    """Each library, uniform and mixed, padded and not; rows of padding become exact zeros."""
    queries, lengths, seed = data.draw(batches(world))
    metadata = world.step(queries, lengths, seed, full=full)
    expected = world.run(Reference().reserve(world.reservation), metadata)
    with installed():
        got = world.run(FlashAttention().reserve(world.reservation), metadata)
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=1e-3)
    assert not got[sum(queries) :].any()


@settings(max_examples=max(settings.default.max_examples // 2, 3))
@given(st.data(), worlds(), st.lists(st.booleans(), min_size=2, max_size=3))
def test_rows_of_an_earlier_batch_become_padding(data, world, kinds):
    """Larger and smaller batches after one another: the mask of real rows is that of the last."""
    with installed():
        runs = FlashAttention().reserve(world.reservation)
        for full in kinds:
            queries, lengths, seed = data.draw(batches(world))
            metadata = world.step(queries, lengths, seed, full=full)
            got = world.run(runs, metadata)
            expected = world.run(Reference().reserve(world.reservation), metadata)
            torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=1e-3)
            assert not got[sum(queries) :].any()


@settings(max_examples=max(settings.default.max_examples // 2, 3))
@given(st.data(), worlds())
def test_prepare_writes_no_mask_if_the_number_of_tokens_is_unchanged(data, world):
    """Other lengths of as many tokens launch nothing; torch counts what is written to a tensor."""
    with installed():
        runs = FlashAttention().reserve(world.reservation)
        queries, lengths, seed = data.draw(batches(world))
        runs.prepare(world.step(queries, lengths, seed, full=True))
        before = runs._is_real._version
        runs.prepare(world.step(queries, [length + 1 for length in lengths], seed, full=True))
        assert runs._is_real._version == before


@given(st.data(), worlds())
def test_baked_in_numbers_do_not_depend_on_the_batch(data, world):
    """Two batches of one entry: equal host numbers, an equal layout, and the schedule in one place."""
    seen = []
    with installed() as stub:
        runs = FlashAttention().reserve(world.reservation)
        for _ in range(2):
            queries, lengths, seed = data.draw(batches(world))
            world.run(runs, world.step(queries, lengths, seed, full=True))
            seen.append((stub.calls[-1], runs.layout()))
    assert seen[0] == seen[1]
    field = world.reservation.fields.get("scheduler_metadata")
    if field is not None and world.scoring.softcap is None:
        assert seen[0][0]["schedule"] == field.data_ptr()


@given(st.data(), worlds(st.just(libraries.FA3)))
def test_prepare_zeroes_the_tail_of_a_schedule(data, world):
    """What was there before is gone, past the length that the library asked for."""
    with installed() as stub:
        runs = FlashAttention().reserve(world.reservation)
        queries, lengths, seed = data.draw(batches(world))
        world.run(runs, world.step(queries, lengths, seed, full=True))
    field, layout = world.reservation.fields.get("scheduler_metadata"), runs.layout()
    if field is None:
        assert stub.schedules == 0
    else:
        assert (field[: layout[1]] == stub.schedules).all()
        assert not field[layout[1] :].any()


@given(LIBRARIES, st.integers(1, 4096), st.integers(1, 64), st.integers(1, 64), st.integers(1, 200))
def test_splits_are_bounded_and_never_automatic(library, reqs, query_len, kv_heads, sms):
    """From 1 to the bound; what they need in the pool stays below what the workspace's formula says."""
    tokens = reqs * query_len
    entry = Entry(mode=GraphMode.FULL, num_tokens=tokens, num_reqs=reqs, query_len=query_len)
    attention = Attention(
        num_layers=1, num_heads=64, num_kv_heads=kv_heads, head_dim=64, max_model_len=64, max_query_len=1
    )
    splits = num_splits(library, entry, attention, environment(library, sms))
    assert 1 <= splits <= libraries.MAX_SPLITS
    assert splits == 1 or library.splits
    if library is libraries.FA3:
        assert splits == 1 or splits * tokens <= libraries.MAX_SPLITS * libraries.SPLIT_TOKENS
    if library is libraries.FA2:
        assert splits == 1 or splits * reqs * kv_heads <= sms
