"""Pages, and what is written into them."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from capture_planner.plugins.backend import NULL_PAGE, NULL_SLOT
from capture_planner.records.backend import Attention
from capture_planner_runner.execution.updates import Updates
from capture_planner_runner.serving.states import PageFormat, PagePool, layer_cache

CPU = torch.device("cpu")


def attention(num_kv_heads=2, head_dim=3):
    """A layer of these key/value heads."""
    return Attention(
        num_layers=1,
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=16,
        max_query_len=1,
    )


class Pages(RuleBasedStateMachine):
    """Take and give back in any order: the pool is a set that loses no page and knows no page twice."""

    taken = Bundle("taken")

    @initialize(num_pages=st.integers(1, 12))
    def make(self, num_pages):
        """Begin with all pages but the null page."""
        self.pool, self.free = PagePool(num_pages), set(range(num_pages)) - {NULL_PAGE}
        self.last = []

    @rule(target=taken, data=st.data())
    def take(self, data):
        """Pages that were free, and that nobody has now."""
        count = data.draw(st.integers(0, len(self.free)))
        pages = self.pool.take(count)
        assert len(pages) == len(set(pages)) == count
        assert set(pages) <= self.free
        # What came back last goes out first.
        assert set(pages) <= set(self.last) or set(self.last) <= set(pages)
        self.free -= set(pages)
        self.last = []
        return pages

    @rule(pages=consumes(taken))
    def give_back(self, pages):
        """They can be taken again."""
        self.pool.give_back(pages)
        self.free |= set(pages)
        self.last = pages

    @invariant()
    def counts(self):
        """``free`` is how many there are."""
        assert self.pool.free == len(self.free)


TestPages = Pages.TestCase


def test_more_pages_than_are_free_are_not_given():
    """Whoever asks has looked before."""
    pool = PagePool(3)
    with pytest.raises(AssertionError, match="more pages"):
        pool.take(3)
    assert pool.free == 2


@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 30))
def test_pages_of_tokens_are_as_few_as_hold_them(tokens, page_size, num_pages):
    """Not one more, and none for nothing."""
    form = PageFormat(page_size=page_size, num_pages=num_pages)
    pages = form.pages(tokens)
    assert pages * page_size >= tokens
    assert pages == 0 or (pages - 1) * page_size < tokens
    assert form.slots == len(range(0, num_pages * page_size))


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 5),
    st.sampled_from((torch.float64, torch.bfloat16)),
    st.booleans(),
    st.integers(0, 1 << 32),
)
def test_rows_are_written_where_their_slots_say_and_nowhere_else(page_size, num_pages, padding, dtype, packed, seed):
    """Slot s is row ``s % page_size`` of page ``s // page_size``; padding stays in the null slot."""
    form = PageFormat(page_size=page_size, num_pages=num_pages)
    cache, chosen = layer_cache(attention(), form, dtype, CPU, packed=packed), random.Random(seed)
    slots = chosen.sample(range(1, form.slots), chosen.randint(0, form.slots - 1))
    count = len(slots) + padding
    torch.manual_seed(seed)
    keys, values = (torch.randn(count, 2, 3).to(dtype) for _ in range(2))
    wanted_keys, wanted_values = cache.keys.clone(), cache.values.clone()
    Updates().store(cache, torch.tensor(slots + [NULL_SLOT] * padding, dtype=torch.int64), keys, values)
    for row, slot in enumerate(slots):
        wanted_keys[slot // page_size, slot % page_size] = keys[row]
        wanted_values[slot // page_size, slot % page_size] = values[row]
    for held, wanted in ((cache.keys, wanted_keys), (cache.values, wanted_values)):
        # Which padded row stays in the null slot is open.
        held[NULL_PAGE, NULL_SLOT] = wanted[NULL_PAGE, NULL_SLOT] = 0
        assert torch.equal(held, wanted)


def test_a_layers_cache_is_zero_and_has_the_backends_shape():
    """``[pages, page_size, kv heads, head_dim]`` for keys and for values, in memory of their own."""
    cache = layer_cache(attention(4, 8), PageFormat(page_size=5, num_pages=7), torch.float16, CPU)
    for held in (cache.keys, cache.values):
        assert held.shape == (7, 5, 4, 8)
        assert held.dtype == torch.float16
        assert not held.any()
    assert cache.keys.data_ptr() != cache.values.data_ptr()


def test_packed_cache_has_vllms_layout():
    """Keys and values of a token and a head lie next to each other, in one tensor; slots are equally far apart."""
    cache = layer_cache(attention(4, 8), PageFormat(page_size=5, num_pages=7), torch.float16, CPU, packed=True)
    cache.keys.fill_(1)
    cache.values.fill_(2)
    assert cache.packed.shape == (7, 5, 4, 16)
    assert cache.packed.is_contiguous()
    assert cache.packed.unique_consecutive().tolist() == [1, 2] * (7 * 5 * 4)
    assert torch.equal(cache.packed[..., :8], cache.keys)
