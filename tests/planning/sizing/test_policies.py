"""Policies: what each makes of a domain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.planning.sizing import Context, decode_sizes, minimax, mixed_sizes, worst_ratio
from capture_planner.planning.sizing import engine_lists as engines
from capture_planner.planning.sizing.policies import DEFAULT_RATIO
from capture_planner.records.batch_space import Domain
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Limits, Parallel, Policy, Sizes
from capture_planner.testing import specs


def context(capability="9.0", most=256, tokens=8192, speculative=None):
    """A GPU and its limits."""
    device = Device(kind=DeviceKind.CUDA, name="g", capability=capability, memory=80 << 30, multiprocessors=132)
    return Context(
        limits=Limits(max_num_reqs=most, max_num_tokens=tokens),
        speculative=speculative,
        parallel=Parallel(),
        environment=Environment(name="e", device=device),
    )


SIZES = specs().map(lambda spec: spec.sizes)


@given(SIZES, st.integers(1, 300), st.sampled_from((1, 2, 4)), st.integers(1, 5))
def test_policy_sizes_are_ascending_aligned_and_needed(sizes, last, step, query_len):
    """Each size of a choice serves some count that no smaller one serves, and covers its domain."""
    domain = Domain.upto(last, step)
    for choice in (
        decode_sizes(sizes, domain, query_len, context(most=last)),
        mixed_sizes(sizes, domain, (), context(tokens=last)),
    ):
        assert list(choice.sizes) == sorted(set(choice.sizes))
        assert all(size % step == 0 for size in choice.sizes)
        assert domain.needed(choice.sizes) == choice.sizes
        assert bool(choice.domain) == bool(choice.sizes)
        assert choice.message
        if choice.sizes:
            assert choice.domain.ceiling == choice.sizes[-1]


@given(st.integers(1, 600), st.sampled_from((1, 2, 3)))
def test_default_policy_pads_by_at_most_an_eighth(last, step):
    """To the last request, as far as whole numbers allow."""
    domain = Domain.upto(last, step)
    choice = decode_sizes(Sizes(), domain, 1, context(most=last))
    assert choice.sizes[-1] == domain.ceiling
    assert worst_ratio(domain, choice.sizes) <= DEFAULT_RATIO


@given(st.integers(1, 600))
def test_powers_of_two_policy_ends_at_the_maximum(last):
    """1, 2, 4, ... and the maximum itself."""
    choice = decode_sizes(Sizes(policy=Policy.POWERS_OF_TWO), Domain.upto(last), 1, context(most=last))
    assert choice.sizes == tuple(sorted({1 << i for i in range(10) if 1 << i <= last} | {last}))


@given(st.sets(st.integers(1, 64), min_size=1), st.integers(1, 64))
def test_explicit_policy_keeps_the_given_requests(named, last):
    """Those above the maximum stand for the maximum."""
    sizes = Sizes(policy=Policy.EXPLICIT, num_reqs=tuple(named))
    choice = decode_sizes(sizes, Domain.upto(last), 1, context(most=last))
    assert choice.sizes == tuple(sorted({min(n, last) for n in named}))
    assert choice.domain.ceiling == choice.sizes[-1]
    assert not choice.adaptive


def test_explicit_policy_keeps_the_given_tokens():
    """Requests that are named say nothing of tokens."""
    tokens = Sizes(policy=Policy.EXPLICIT, num_tokens=(64, 7))
    assert mixed_sizes(tokens, Domain.upto(8192), (), context()).sizes == (7, 64)
    requests = Sizes(policy=Policy.EXPLICIT, num_reqs=(8,))
    none = mixed_sizes(requests, Domain.upto(8192), (), context())
    assert (none.sizes, none.message) == ((), "no token counts are given")
    assert decode_sizes(requests, Domain(()), 1, context()).sizes == ()


def test_minimax_policy_uses_its_number_of_graphs():
    """And may be computed again for fewer, as the default may; lists and powers of two may not."""
    sizes = Sizes(policy=Policy.MINIMAX, graphs=5)
    choice = decode_sizes(sizes, Domain.upto(64), 1, context(most=64))
    assert choice.sizes == minimax(Domain.upto(64), 5)
    assert choice.message.startswith("the least worst padding with 5 sizes; 5 request counts up to 64")
    adaptive = {
        policy
        for policy in set(Policy) - {Policy.EXPLICIT, Policy.MINIMAX, Policy.MEASURED}
        if decode_sizes(Sizes(policy=policy), Domain.upto(64), 1, context(most=64)).adaptive
    }
    assert choice.adaptive
    assert adaptive == {Policy.DEFAULT}


def test_choice_within_a_cap_covers_less():
    """To the largest size that is left, or to nothing."""
    sizes = Sizes(policy=Policy.EXPLICIT, num_reqs=(5, 6, 7, 40))
    choice = decode_sizes(sizes, Domain.upto(64), 1, context())
    assert choice.within(None) is choice.within(40) is choice
    assert choice.within(39).domain == Domain.upto(7)
    assert choice.within(39).message.endswith("; none above 39")
    assert not choice.within(4).domain


@pytest.mark.parametrize(("capability", "most"), [("9.0", 512), ("10.0", 1024), ("12.0", 512)])
def test_mixed_sizes_end_at_the_platform_ceiling(capability, most):
    """1024 tokens on the SM100 family, else 512."""
    choice = mixed_sizes(Sizes(), Domain.upto(8192), (), context(capability))
    assert choice.sizes[-1] == most


def test_mixed_sizes_include_anchors():
    """A decode of 700 tokens is a size of its own, and the largest."""
    choice = mixed_sizes(Sizes(), Domain.upto(8192), (700, 96), context())
    assert {96, 700} <= set(choice.sizes)
    assert choice.sizes[-1] == 700


def test_maximum_below_every_count_gives_no_sizes():
    """And says so."""
    choice = decode_sizes(Sizes(max_reqs=2), Domain(((5, 8),)), 1, context())
    assert choice.sizes == ()
    assert "no request counts up to the maximum" in choice.message
    assert not choice.domain


@pytest.mark.parametrize(
    ("sizes", "last"),
    [
        (Sizes(policy=Policy.VLLM), 256),
        (Sizes(policy=Policy.SGLANG), 256),
        (Sizes(policy=Policy.TENSORRT_LLM), 128),
        (Sizes(policy=Policy.SGLANG, padding=False, max_reqs=9), 9),
        (Sizes(policy=Policy.TENSORRT_LLM, padding=True, max_reqs=300), 256),
    ],
)
def test_engine_policies_end_at_the_engines_maximum(sizes, last):
    """256 requests on an 80 GiB GPU."""
    assert decode_sizes(sizes, Domain.upto(256), 1, context()).sizes[-1] == last


def test_vllm_policy_lists_each_tier():
    """3 draft tokens to 21 requests and one above: sizes that are 4 times and twice the last of each."""
    eagle = Speculative(method=Method.EAGLE, num_tokens=3, schedule=((1, 21, 3), (22, 101, 1)))
    choice = mixed_sizes(Sizes(policy=Policy.VLLM), Domain.upto(8192), (), context(most=101, speculative=eagle))
    assert choice.sizes == engines.vllm_tokens(
        max_num_reqs=101, max_num_tokens=8192, query_len=4, platform_max=512, tiers=[(4, 21), (2, 101)]
    )
    assert {84, 202} <= set(choice.sizes)


@given(st.integers(1, 255), st.sampled_from((Policy.VLLM, Policy.SGLANG, Policy.TENSORRT_LLM)))
def test_policy_stays_within_a_capped_domain(cap, policy):
    """What a backend cannot capture is not in any list, engine or not."""
    choice = decode_sizes(Sizes(policy=policy), Domain.upto(cap), 1, context(most=256)).within(cap)
    assert max(choice.sizes, default=0) <= cap


@pytest.mark.parametrize("policy", [Policy.VLLM, Policy.SGLANG, Policy.TENSORRT_LLM])
def test_engine_policies_only_shorten_the_list(policy):
    """Sizes that alignment forbids are left out, not rounded, and how many are left is said."""
    whole = decode_sizes(Sizes(policy=policy), Domain.upto(256), 1, context())
    aligned = decode_sizes(Sizes(policy=policy), Domain.upto(255, 3), 1, context())
    assert aligned.sizes == tuple(size for size in whole.sizes if size % 3 == 0)
    assert f", of which {len(aligned.sizes)} of {len(whole.sizes)} sizes are aligned" in aligned.message


def test_tensorrt_llm_policy_is_limited_by_tokens():
    """100 tokens are 33 requests of 3."""
    sizes = Sizes(policy=Policy.TENSORRT_LLM, padding=True)
    assert decode_sizes(sizes, Domain.upto(33), 3, context(tokens=100)).sizes == (1, 2, 4, 8, 16, 24, 32, 33)


def test_sglang_policy_covers_all_admissible_requests():
    """100 is not in its list, and is a size where 100 requests are the most."""
    choice = decode_sizes(Sizes(policy=Policy.SGLANG), Domain.upto(100), 1, context(most=100))
    assert choice.sizes == (1, 2, 4, 8, 12, *range(16, 97, 8), 100)
    eagle = Speculative(method=Method.EAGLE, num_tokens=3)
    choice = decode_sizes(Sizes(policy=Policy.SGLANG, max_reqs=12), Domain.upto(100), 4, context(speculative=eagle))
    assert choice.sizes == (*range(1, 9), 10, 12)
    exact = Sizes(policy=Policy.SGLANG, max_reqs=12, padding=False)
    assert decode_sizes(exact, Domain.upto(100), 1, context()).sizes == tuple(range(1, 13))


@pytest.mark.parametrize(("policy", "last"), [(Policy.SGLANG, 2048), (Policy.TENSORRT_LLM, None)])
def test_engine_policies_for_mixed_batches(policy, last):
    """SGLang captures prefills up to 2048 tokens, TensorRT-LLM none."""
    sizes = mixed_sizes(Sizes(policy=policy), Domain.upto(8192), (), context()).sizes
    assert (sizes[-1] if sizes else None) == last


@pytest.mark.parametrize(("num_reqs", "percent"), [((8,), "700.0%"), ((2, 3, 8), "100.0%"), ((6, 7, 8), "500.0%")])
def test_choice_message_has_the_worst_padding(num_reqs, percent):
    """Padded over real, less one."""
    choice = decode_sizes(Sizes(policy=Policy.EXPLICIT, num_reqs=num_reqs), Domain.upto(8), 1, context())
    assert choice.message.endswith(f"{len(num_reqs)} request counts up to 8, worst padding {percent}")


def test_context_max_query_len():
    """1 + K, and 1 without speculation."""
    eagle = Speculative(method=Method.EAGLE, num_tokens=3)
    assert context(speculative=eagle).max_query_len == 4
    assert context().max_query_len == 1


def test_explicit_policy_reports_changed_sizes():
    """Sizes that serve no batch, and sizes that alignment moved."""
    sizes = Sizes(policy=Policy.EXPLICIT, num_reqs=(3, 5))
    message = decode_sizes(sizes, Domain.upto(8, 2), 1, context()).message
    assert message.endswith("; 3, 5 are rounded to multiples of 2")
    gap = Domain(((1, 2), (7, 8)))
    message = decode_sizes(sizes, gap, 1, context()).message
    assert message.endswith("; 5 are not needed by any batch")
