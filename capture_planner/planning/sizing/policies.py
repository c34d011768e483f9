"""From a policy to sizes: one function for decodes, one for mixed batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import attrs

from capture_planner.planning.sizing import engine_lists as engines
from capture_planner.planning.sizing.minimax import fewest, minimax, worst_ratio
from capture_planner.planning.sizing.program import LadderProblem
from capture_planner.records.batch_space import Domain
from capture_planner.records.environment import Environment
from capture_planner.records.model import Speculative
from capture_planner.records.spec import Limits, Parallel, Policy, Sizes
from capture_planner.records.text import query_len_text

TimeOf = Callable[[int], float]
"""Milliseconds of a graph by its size, in requests of decodes or tokens of mixed batches."""

DEFAULT_RATIO = Fraction(9, 8)
"""Worst padded/real ratio of the default policy, which takes the fewest sizes within it."""

TIME_RATIO = Fraction(51, 50)
"""Worst ratio of a batch's time to that of its own size, where a profile has times: what profiles are measured to."""

SGLANG_PREFILL_TOKENS = 2048
"""SGLang's documented largest prefill graph, in tokens."""

TENSORRT_LLM_REQUESTS = 128
"""TensorRT-LLM's default largest graph batch."""


@attrs.frozen(kw_only=True)
class Context:
    """The facts that a policy may use, apart from the counts to cover."""

    limits: Limits
    speculative: Speculative | None
    parallel: Parallel
    environment: Environment
    time: TimeOf | None = None
    """The time of the ladder's sizes by a profile of this machine; None: not known."""
    source: str = ""
    """The profile in words, with how near it is."""

    @property
    def max_query_len(self) -> int:
        return 1 + (self.speculative.num_tokens if self.speculative else 0)

    @property
    def default_tokens(self) -> int:
        """Default largest mixed size, in tokens: vLLM 0.33's ceiling, above which steps are bound by compute."""
        return 1024 if self.environment.device.sm[0] == 10 else 512


@attrs.frozen(kw_only=True)
class Choice:
    """Sizes that a policy chose, the counts that they cover, and a sentence that says why."""

    domain: Domain
    sizes: tuple[int, ...]
    adaptive: bool
    message: str

    def within(self, cap: int | None) -> Choice:
        """Return the choice without sizes above ``cap``."""
        sizes = tuple(size for size in self.sizes if cap is None or size <= cap)
        if sizes == self.sizes:
            return self
        domain = self.domain.clipped(sizes[-1] if sizes else 0)
        return attrs.evolve(self, domain=domain, sizes=sizes, message=f"{self.message}; none above {cap}")


def decode_sizes(sizes: Sizes, domain: Domain, query_len: int, context: Context, *, varies: bool = False) -> Choice:
    """Choose request counts for decodes of ``query_len`` tokens each, or of up to so many where that ``varies``."""
    most = domain if sizes.max_reqs is None else _up_to(domain, sizes.max_reqs)
    each = query_len_text(query_len, varies=varies)
    unit = f"request counts of {each} tokens each" if query_len > 1 else "request counts"
    if sizes.policy in (Policy.DEFAULT, Policy.MINIMAX, Policy.POWERS_OF_TWO):
        return _computed(sizes, most, (), unit, context)
    if sizes.policy is Policy.MEASURED:
        return Choice(domain=most, sizes=(), adaptive=False, message="")
    if sizes.policy is Policy.EXPLICIT:
        return _explicit(sizes.num_reqs or (), most, unit)
    if sizes.policy is Policy.VLLM:
        listed = engines.vllm_requests(
            _vllm_tokens(sizes, context),
            query_len=query_len,
            max_query_len=context.max_query_len,
            max_num_reqs=min(context.limits.max_num_reqs, sizes.max_reqs or context.limits.max_num_reqs),
        )
    elif sizes.policy is Policy.SGLANG:
        memory, tensor = context.environment.device.memory, context.parallel.tensor
        top = sizes.max_reqs or engines.sglang_default_max(memory, tensor)
        listed = engines.sglang_requests(
            top, speculative=context.speculative is not None, padding=sizes.padding is not False
        )
        # SGLang captures nothing above its request pool; a longer list ends at the pool itself.
        pool = domain.round_up(context.limits.max_num_reqs)
        listed = tuple(size for size in {*listed, *([pool] if top > pool else [])} if size <= pool)
    else:
        assert sizes.policy is Policy.TENSORRT_LLM, sizes.policy
        padding = sizes.padding is True
        listed = engines.tensorrt_llm_requests(sizes.max_reqs or TENSORRT_LLM_REQUESTS, padding=padding)
        most_reqs = min(context.limits.max_num_reqs, context.limits.max_num_tokens // query_len)
        listed = engines.tensorrt_llm_admitted(listed, most_reqs, padding=padding)
    return _listed(sizes.policy, listed, domain, unit)


def mixed_sizes(sizes: Sizes, domain: Domain, anchors: tuple[int, ...], context: Context) -> Choice:
    """Choose token counts for mixed batches; ``anchors``, tokens of decodes that only they serve, must be sizes."""
    unit = "token counts"
    if sizes.policy in (Policy.DEFAULT, Policy.MINIMAX, Policy.POWERS_OF_TWO):
        top = sizes.max_tokens or max(context.default_tokens, *anchors, 0)
        return _computed(sizes, _up_to(domain, top), anchors, unit, context)
    if sizes.policy is Policy.MEASURED:
        most = domain if sizes.max_tokens is None else _up_to(domain, sizes.max_tokens)
        return Choice(domain=most, sizes=(), adaptive=False, message="")
    if sizes.policy is Policy.EXPLICIT:
        return _explicit(sizes.num_tokens or (), _up_to(domain, sizes.max_tokens or domain.ceiling), unit)
    if sizes.policy is Policy.VLLM:
        listed = _vllm_tokens(sizes, context)
    elif sizes.policy is Policy.SGLANG:
        top = min(sizes.max_tokens or SGLANG_PREFILL_TOKENS, context.limits.max_num_tokens)
        listed = engines.sglang_tokens(top)
    else:
        assert sizes.policy is Policy.TENSORRT_LLM, sizes.policy
        # TensorRT-LLM's list is of decodes only.
        listed = ()
    return _listed(sizes.policy, listed, domain, unit)


def _up_to(domain: Domain, most: int) -> Domain:
    """Return the counts whose sizes, rounded up to the step, are at most ``most``."""
    return domain.clipped(most // domain.step * domain.step)


def _computed(sizes: Sizes, domain: Domain, anchors: tuple[int, ...], unit: str, context: Context) -> Choice:
    if not domain:
        return Choice(domain=domain, sizes=(), adaptive=True, message=f"no {unit} up to the maximum")
    # An anchor may be between two steps, or above a maximum; a size may not.
    anchors = tuple(sorted({min(domain.round_up(anchor), domain.ceiling) for anchor in anchors}))
    # A budget thins a list of powers of two, and computes no other sizes for it.
    adaptive = sizes.policy is not Policy.POWERS_OF_TWO
    if sizes.policy is Policy.POWERS_OF_TWO:
        chosen = domain.needed([*(1 << i for i in range(domain.ceiling.bit_length())), *anchors, domain.ceiling])
        how = "powers of two and the maximum"
    elif sizes.policy is Policy.MINIMAX:
        assert sizes.graphs is not None
        chosen = minimax(domain, sizes.graphs, anchors)
        how = f"the least worst padding with {sizes.graphs} sizes"
    elif context.time is not None:
        chosen = domain.needed([*_timed(domain, context.time), *anchors])
        # Not adaptive: sizes recomputed by padding alone would ignore the times.
        within = f"{float(TIME_RATIO - 1):.1%} of a size of their own"
        how, adaptive = f"the fewest sizes whose time is within {within}, {context.source}", False
    else:
        chosen = minimax(domain, len(fewest(domain, DEFAULT_RATIO, anchors=anchors)), anchors)
        how = f"the fewest sizes that keep the worst padding within {float(DEFAULT_RATIO - 1):.1%}"
    return Choice(domain=domain, sizes=chosen, adaptive=adaptive, message=f"{how}; {_worst(domain, chosen, unit)}")


def _timed(domain: Domain, time: TimeOf) -> Iterator[int]:
    """Yield the fewest sizes with which no count takes more than ``TIME_RATIO`` times its own size."""
    sizes = list(domain.needed(count for first, last in domain.intervals for count in range(first, last + 1)))
    times = [round(time(size) * 1_000_000) for size in sizes]
    # How often a count runs decides nothing here, and the largest size leaves none without a graph.
    problem = LadderProblem.of(sizes, times, times, times, sizes[-1])
    yield from (problem.sizes[index] for index in problem.within(TIME_RATIO))


def _explicit(named: tuple[int, ...], domain: Domain, unit: str) -> Choice:
    if not named or not domain:
        return Choice(domain=Domain((), domain.step), sizes=(), adaptive=False, message=f"no {unit} are given")
    chosen = domain.needed(min(size, domain.ceiling) for size in named)
    covered = domain.clipped(chosen[-1]) if chosen else Domain((), domain.step)
    changed = sorted(set(named) - set(chosen))
    message = f"as given; {_worst(covered, chosen, unit)}"
    if changed:
        why = f"rounded to multiples of {domain.step}" if domain.step > 1 else "not needed by any batch"
        message += f"; {', '.join(map(str, changed))} are {why}"
    return Choice(domain=covered, sizes=chosen, adaptive=False, message=message)


def _listed(policy: Policy, listed: tuple[int, ...], domain: Domain, unit: str) -> Choice:
    """Keep the sizes of an engine's list that are aligned and that some batch needs."""
    chosen = domain.needed([size for size in listed if size % domain.step == 0]) if domain else ()
    covered = domain.clipped(chosen[-1]) if chosen else Domain((), domain.step)
    message = f"the list of {policy.value}"
    if len(chosen) < len(listed):
        message += f", of which {len(chosen)} of {len(listed)} sizes are aligned and reachable"
    return Choice(domain=covered, sizes=chosen, adaptive=False, message=f"{message}; {_worst(covered, chosen, unit)}")


def _worst(domain: Domain, chosen: tuple[int, ...], unit: str) -> str:
    if not chosen:
        return f"no {unit}"
    padding = float(worst_ratio(domain, chosen) - 1)
    return f"{len(chosen)} {unit} up to {chosen[-1]}, worst padding {padding:.1%}"


def _vllm_tokens(sizes: Sizes, context: Context) -> tuple[int, ...]:
    limits, speculative = context.limits, context.speculative
    tiers: dict[int, int] = {}
    if speculative is not None and speculative.ranges:
        tiers = {1 + k: last for _, last, k in speculative.tiers(limits.max_num_reqs)}
    return engines.vllm_tokens(
        max_num_reqs=limits.max_num_reqs,
        max_num_tokens=limits.max_num_tokens,
        query_len=context.max_query_len,
        platform_max=context.default_tokens,
        tiers=tuple(tiers.items()),
        user_sizes=sizes.num_tokens,
        user_max=sizes.max_tokens,
    )
