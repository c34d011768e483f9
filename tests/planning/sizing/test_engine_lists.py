"""The lists of today's engines: restated from their rules, and a few of them written out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.planning.sizing import engine_lists as engines

GiB = 1 << 30


def grid(n):
    """Whether vLLM has n in its grid: 1, 2, 4, eights below 256, sixteens from there."""
    return n in (1, 2, 4) or (n % 8 == 0 and n < 256) or (n % 16 == 0 and n >= 256)


def vllm(reqs, tokens, q, platform, tiers=()):
    """List vLLM's defaults, number by number."""
    top = min(reqs * q * 2, platform)
    sizes = {n for n in range(1, min(top, tokens) + 1) if grid(n)}
    if tokens <= top:
        sizes.add(tokens)
    if q == 1:
        extra = {reqs} if reqs <= top else set()
    else:
        extra = set()
        for width, widest in tiers or ((q, reqs),):
            widest = min(widest, platform)
            extra |= {n * width for n in range(1, widest + 1) if grid(n) or n == widest}
    return tuple(sorted(sizes | {n for n in extra if n <= top and n <= tokens}))


@given(st.integers(1, 600))
def test_vllm_for_interactivity_has_every_size_to_32(reqs):
    """And no other one that the default has not."""
    tokens = engines.vllm_tokens(
        max_num_reqs=reqs, max_num_tokens=3000, query_len=1, platform_max=512, interactive=True
    )
    assert set(tokens) == {*vllm(reqs, 3000, 1, 512), *range(1, min(2 * reqs, 32) + 1)}


@given(st.integers(1, 600), st.integers(1, 3000), st.integers(1, 8), st.sampled_from((512, 1024)))
def test_vllm_default_tokens(reqs, tokens, q, platform):
    """The grid, the decodes of one query length, and the scheduler's limit where it is small."""
    listed = engines.vllm_tokens(max_num_reqs=reqs, max_num_tokens=tokens, query_len=q, platform_max=platform)
    assert listed == vllm(reqs, tokens, q, platform)


@pytest.mark.parametrize("q", [1, 2, 3])
def test_vllm_default_tokens_of_every_batch(q):
    """The same for each number of requests to 300, at the ceiling and beyond, and for edges of the grid."""
    for reqs in (*range(1, 301), 511, 512, 513, 600):
        for tokens in (reqs, 255 + reqs % 3, 511 + reqs % 3, 8192):
            listed = engines.vllm_tokens(max_num_reqs=reqs, max_num_tokens=tokens, query_len=q, platform_max=512)
            assert listed == vllm(reqs, tokens, q, 512)


@given(st.integers(1, 300), st.lists(st.tuples(st.integers(1, 6), st.integers(1, 300)), min_size=1, max_size=3))
def test_vllm_tokens_of_a_dynamic_schedule(reqs, tiers):
    """Decode sizes once for each tier."""
    q = max(2, *(width for width, _ in tiers))
    listed = engines.vllm_tokens(max_num_reqs=reqs, max_num_tokens=8192, query_len=q, platform_max=512, tiers=tiers)
    assert listed == vllm(reqs, 8192, q, 512, tiers)


@given(st.lists(st.integers(1, 900), min_size=1), st.integers(1, 900))
def test_vllm_user_sizes(sizes, tokens):
    """De-duplicated, sorted, and those above the scheduler's limit dropped."""
    listed = engines.vllm_tokens(max_num_reqs=8, max_num_tokens=tokens, query_len=1, platform_max=512, user_sizes=sizes)
    assert listed == tuple(sorted({size for size in sizes if size <= tokens}))


@given(st.lists(st.integers(1, 600), unique=True), st.integers(1, 6), st.integers(0, 3), st.integers(1, 300))
def test_vllm_uniform_decodes(tokens, q, more, reqs):
    """T = round_up(s, q); dropped, not clamped, beyond the largest size or max_num_seqs."""
    rounded = {-(-s // q) * q for s in tokens}
    kept = {t for t in rounded if t <= max(tokens, default=0) and t <= reqs * (q + more) and t // q <= reqs}
    listed = engines.vllm_requests(sorted(tokens), query_len=q, max_query_len=q + more, max_num_reqs=reqs)
    assert listed == tuple(sorted(t // q for t in kept))


def test_vllm_uniform_decodes_of_one_request():
    """A limit of one request still has room for its whole query."""
    assert engines.vllm_requests((1, 2, 4, 8), query_len=3, max_query_len=3, max_num_reqs=1) == (1,)


def test_vllm_drops_half_of_the_decodes_at_three_draft_tokens():
    """K = 3, 256 requests, 512 tokens: 128 requests are covered."""
    tokens = engines.vllm_tokens(max_num_reqs=256, max_num_tokens=8192, query_len=4, platform_max=512)
    assert engines.vllm_requests(tokens, query_len=4, max_query_len=4, max_num_reqs=256)[-1] == 128


def test_vllm_user_sizes_at_query_length_three():
    """[1, 2, 4, 8, 16, 32] gives full graphs of 3, 6, 9 and 18 tokens only."""
    reqs = engines.vllm_requests((1, 2, 4, 8, 16, 32), query_len=3, max_query_len=3, max_num_reqs=256)
    assert [3 * n for n in reqs] == [3, 6, 9, 18]


def test_vllm_golden():
    """The default of 256 requests without speculation."""
    listed = engines.vllm_tokens(max_num_reqs=256, max_num_tokens=8192, query_len=1, platform_max=512)
    assert listed == (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    assert len(listed) == 51


def test_vllm_user_max_replaces_the_decodes():
    """A maximum that the user sets leaves the plain grid."""
    listed = engines.vllm_tokens(max_num_reqs=100, max_num_tokens=8192, query_len=3, platform_max=512, user_max=30)
    assert listed == (1, 2, 4, 8, 16, 24)


def sglang(top, speculative):
    """SGLang's decode batch sizes, number by number."""

    def listed(n):
        if speculative:
            return (
                n <= 8
                or (n <= 32 and n % 2 == 0)
                or (40 <= n <= 64 and n % 4 == 0)
                or (72 <= n <= 256 and n % 8 == 0)
                or (n >= 272 and n % 16 == 0)
            )
        return (
            n in (1, 2, 4, 8, 12)
            or (16 <= n <= 256 and n % 8 == 0)
            or (272 <= n < 512 and n % 16 == 0)
            or (n >= 512 and n % 32 == 0)
        )

    return tuple(n for n in range(1, top + 1) if listed(n) or n == top)


@pytest.mark.parametrize("speculative", [True, False])
def test_sglang_requests(speculative):
    """The grid up to the maximum, which is always in it: for each maximum to 600, and some beyond."""
    for top in (*range(1, 601), 1023, 1024, 1025, 1100):
        listed = engines.sglang_requests(top, speculative=speculative, padding=True)
        assert listed == sglang(top, speculative)


@given(st.integers(1, 100), st.booleans())
def test_sglang_without_padding_has_every_size(top, speculative):
    """1 to the maximum."""
    listed = engines.sglang_requests(top, speculative=speculative, padding=False)
    assert listed == tuple(range(1, top + 1))


@pytest.mark.parametrize("top", [n + d for n in (*range(32, 1101, 68), 4096, 4608, 5120) for d in (-1, 0, 1)])
def test_sglang_tokens(top):
    """Six steps, and the maximum only where it is a multiple of its step."""
    steps = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256), (4608, 10**6, 512))
    listed = [n for n in range(1, top + 1) if any(a <= n <= b and (n - a) % c == 0 for a, b, c in steps)]
    assert engines.sglang_tokens(top) == tuple(listed)


@pytest.mark.parametrize(
    ("memory", "plain", "tp4"),
    [
        (16, 8, 8),
        (20, 48, 160),
        (24, 48, 160),
        (35, 32, 160),
        (48, 32, 160),
        (60, 256, 512),
        (80, 256, 512),
        (141, 256, 512),
        (160, 512, 512),
        (180, 512, 512),
    ],
)
def test_sglang_default_maximum(memory, plain, tp4):
    """By memory and tensor-parallel size, of which 4 is the first that counts."""
    assert engines.sglang_default_max(memory * GiB, 1) == plain
    assert engines.sglang_default_max(memory * GiB, 3) == plain
    assert engines.sglang_default_max(memory * GiB, 4) == tp4
    assert engines.sglang_default_max(memory * GiB, 8) == tp4


@pytest.mark.parametrize(("memory", "below", "above"), [(20, 8, 48), (35, 48, 32), (60, 32, 256), (160, 256, 512)])
def test_sglang_default_maximum_changes_at_the_byte(memory, below, above):
    """A device of exactly the bound belongs to the larger ones."""
    assert engines.sglang_default_max(memory * GiB - 1, 1) == below
    assert engines.sglang_default_max(memory * GiB, 1) == above


def test_tensorrt_llm_golden():
    """The defaults with padding on and off."""
    assert engines.tensorrt_llm_requests(128, padding=True) == (1, 2, 4, *range(8, 129, 8))
    assert engines.tensorrt_llm_requests(128, padding=False) == (*range(1, 33), 64, 128)
    assert engines.tensorrt_llm_requests(256, padding=True)[-3:] == (128, 192, 256)
    assert engines.tensorrt_llm_requests(600, padding=False)[-4:] == (128, 256, 512, 600)


def test_tensorrt_llm_requests():
    """Eights to 128 and then 64s with padding, else ones to 32 and powers of two: for each maximum to 600."""
    for top in range(1, 601):
        padded = {n for n in range(1, top) if n in (1, 2, 4) or n % (8 if n <= 128 else 64) == 0}
        exact = {n for n in range(1, top) if n <= 32 or n & (n - 1) == 0}
        assert engines.tensorrt_llm_requests(top, padding=True) == tuple(sorted(padded | {top}))
        assert engines.tensorrt_llm_requests(top, padding=False) == tuple(sorted(exact | {top}))


@given(st.integers(1, 1000), st.booleans(), st.integers(1, 1000))
def test_tensorrt_llm_admits_what_can_decode_together(top, padding, most):
    """Sizes above are dropped; with padding, the first of them becomes the most itself."""
    sizes = engines.tensorrt_llm_requests(top, padding=padding)
    assert sizes[-1] == top
    kept = engines.tensorrt_llm_admitted(sizes, most, padding=padding)
    below = tuple(n for n in sizes if n <= most)
    assert kept == (tuple(sorted({*below, most})) if padding and top > most else below)
