"""Policies: what each makes of a domain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.admissible import Domain
from capture_planner.environment import Device, DeviceKind, Environment
from capture_planner.sizing import Context, decode_sizes, mixed_sizes, worst_ratio
from capture_planner.sizing.policies import DEFAULT_RATIO
from capture_planner.spec import Limits, Parallel, Policy, Sizes
from capture_planner.testing import specs


def context(capability="9.0", most=256, tokens=8192):
    """A GPU and its limits."""
    device = Device(
        kind=DeviceKind.CUDA, name="g", capability=capability, memory=80 << 30, multiprocessors=132
    )
    return Context(
        limits=Limits(max_num_reqs=most, max_num_tokens=tokens),
        speculative=None,
        parallel=Parallel(),
        environment=Environment(name="e", device=device),
    )


SIZES = specs().map(lambda spec: spec.sizes)


@given(SIZES, st.integers(1, 300), st.sampled_from((1, 2, 4)), st.integers(1, 5))
def test_sizes_are_ascending_aligned_and_all_needed(sizes, last, step, query_len):
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
        assert choice.says
        if choice.sizes:
            assert choice.domain.ceiling == choice.sizes[-1]


@given(st.integers(1, 600), st.sampled_from((1, 2, 3)))
def test_default_pads_by_an_eighth_at_most(last, step):
    """To the last request, as far as whole numbers allow."""
    domain = Domain.upto(last, step)
    choice = decode_sizes(Sizes(), domain, 1, context(most=last))
    assert choice.sizes[-1] == domain.ceiling
    assert worst_ratio(domain, choice.sizes) <= DEFAULT_RATIO


@given(st.integers(1, 600))
def test_powers_of_two_end_in_the_maximum(last):
    """1, 2, 4, ... and the maximum itself."""
    choice = decode_sizes(Sizes(policy=Policy.POWERS_OF_TWO), Domain.upto(last), 1, context(most=last))
    assert choice.sizes == tuple(sorted({1 << i for i in range(10) if 1 << i <= last} | {last}))


@given(st.sets(st.integers(1, 64), min_size=1), st.integers(1, 64))
def test_explicit_sizes_are_those_named(named, last):
    """Those above the maximum stand for the maximum."""
    sizes = Sizes(policy=Policy.EXPLICIT, num_reqs=tuple(named))
    choice = decode_sizes(sizes, Domain.upto(last), 1, context(most=last))
    assert choice.sizes == tuple(sorted({min(n, last) for n in named}))


@pytest.mark.parametrize(("capability", "most"), [("9.0", 512), ("10.0", 1024), ("12.0", 512)])
def test_mixed_sizes_end_where_compute_does(capability, most):
    """1024 tokens on the SM100 family, else 512."""
    choice = mixed_sizes(Sizes(), Domain.upto(8192), (), context(capability))
    assert choice.sizes[-1] == most


def test_decodes_that_only_mixed_sizes_serve_are_anchors():
    """A decode of 700 tokens is a size of its own, and the largest."""
    choice = mixed_sizes(Sizes(), Domain.upto(8192), (700, 96), context())
    assert {96, 700} <= set(choice.sizes)
    assert choice.sizes[-1] == 700


def test_a_maximum_below_every_count_leaves_nothing():
    """And says so."""
    choice = decode_sizes(Sizes(max_reqs=2), Domain(((5, 8),)), 1, context())
    assert choice.sizes == ()
    assert "no request counts are left" in choice.says
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
def test_engine_lists_end_where_the_engine_does(sizes, last):
    """256 requests on an 80 GiB GPU."""
    assert decode_sizes(sizes, Domain.upto(256), 1, context()).sizes[-1] == last


@given(st.integers(1, 255), st.sampled_from((Policy.VLLM, Policy.SGLANG, Policy.TENSORRT_LLM)))
def test_a_capped_domain_gets_no_size_above_it(cap, policy):
    """What a backend cannot capture is not in any list, engine or not."""
    choice = decode_sizes(Sizes(policy=policy), Domain.upto(cap), 1, context(most=256)).within(cap)
    assert max(choice.sizes, default=0) <= cap


@pytest.mark.parametrize(("policy", "last"), [(Policy.SGLANG, 2048), (Policy.TENSORRT_LLM, None)])
def test_mixed_lists_of_engines(policy, last):
    """SGLang captures prefills up to 2048 tokens, TensorRT-LLM none."""
    sizes = mixed_sizes(Sizes(policy=policy), Domain.upto(8192), (), context()).sizes
    assert (sizes[-1] if sizes else None) == last


def test_an_explicit_choice_says_what_it_changed():
    """Sizes that serve nobody, and sizes that alignment moved."""
    sizes = Sizes(policy=Policy.EXPLICIT, num_reqs=(3, 5))
    assert "rounded to the step of 4" in decode_sizes(sizes, Domain.upto(8, 4), 1, context()).says
    gap = Domain(((1, 2), (7, 8)))
    assert "serve no batch" in decode_sizes(sizes, gap, 1, context()).says
