"""Specs, as valid as their records demand."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from capture_planner.modes import Chain, GraphMode, Pool, Role
from capture_planner.records._base import replace
from capture_planner.records.model import DraftModel, Latent, Method, Model, Recurrent, ScheduleSource, Speculative
from capture_planner.records.spec import (
    Budget,
    CapturePolicy,
    CaptureTiming,
    GroupSpec,
    KindGraphs,
    Limits,
    Lora,
    Parallel,
    Piecewise,
    Policy,
    Roles,
    RoleSpec,
    Sizes,
    Spec,
)
from capture_planner.testing.strategies.values import BACKENDS, BYTE_COUNTS, composite, counts, maybe, one_of, record_of

_LATENTS = st.builds(Latent, kv_lora_rank=one_of((64, 512)), rope_head_dim=one_of((32, 64)))


@composite
def _recurrents(draw: DrawFn, layers: int) -> Recurrent | None:
    """Draw recurrent layers, fewer than the model has layers."""
    # One layer at least attends.
    if layers == 1 or draw(one_of((True, True, False))):
        return None
    return Recurrent(layers=draw(st.integers(1, layers - 1)), state=draw(one_of((16, 1 << 20, 12345, 1 << 40))))


@composite
def _models(draw: DrawFn, tensor: int) -> Model:
    """Draw a model whose heads divide over ``tensor`` ranks."""
    kv_heads = draw(one_of((tensor, 2 * tensor, 1)))
    layers = draw(st.integers(1, 6))
    # A single KV head is replicated over the ranks, but the query heads have to divide.
    queries = kv_heads if kv_heads % tensor == 0 else kv_heads * tensor
    return record_of(
        draw,
        Model,
        num_layers=layers,
        num_heads=queries * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_dim=draw(one_of((64, 96, 128, 576))),
        max_model_len=draw(one_of((1, 4096, 131072))),
        hidden_size=draw(maybe(one_of((512, 4096)))),
        vocab_size=draw(maybe(one_of((1000, 151936)))),
        latent=draw(maybe(_LATENTS)),
        recurrent=draw(_recurrents(layers)),
    )


@composite
def _limits(draw: DrawFn, max_reqs: int, max_tokens: int, slots: int) -> Limits:
    """Draw limits; ``slots``: rows of the first draft pass that one request must have room for."""
    largest = one_of((max_reqs, min(max_reqs, 64)))
    most = draw(largest if draw(st.booleans()) else counts(min(max_reqs, 64)))
    near = one_of((most, 2 * most, 4 * most, 256, 512, 1024, 4096))
    tokens = draw(st.integers(1, 300) if draw(st.booleans()) else near)
    # One request must fit, with the drafter's own rows.
    return Limits(max_num_reqs=most, max_num_tokens=max(min(tokens, max_tokens), 1 + slots))


@composite
def _schedules(draw: DrawFn, longest: int) -> tuple[tuple[int, int, int], ...]:
    """Draw ranges by batch size that start at 1, with gaps between them, some k above ``longest``."""
    ranges, first = [], 1
    for _ in range(draw(st.integers(0, 4))):
        last = first + draw(st.integers(0, 20))
        ranges.append((first, last, draw(st.integers(0, longest + 1))))
        # Gaps are allowed: the draft length before one holds in it.
        first = last + 1 + draw(one_of((0, 0, 1, 7)))
    return tuple(ranges)


@functools.cache
def _acceptances(longest: int) -> SearchStrategy[tuple[float, ...]]:
    shares = st.lists(one_of((0.0, 0.5, 0.8, 1.0)) | st.floats(0, 1), min_size=longest, max_size=longest)
    return shares.map(lambda drawn: tuple(sorted(drawn, reverse=True)))


_DRAFT_MODELS = st.just(DraftModel()) | st.builds(
    DraftModel,
    num_layers=one_of((2, 1, 3, 4)),
    num_heads=maybe(one_of((4, 8))),
    num_kv_heads=maybe(one_of((2, 4))),
    head_dim=maybe(one_of((64, 128))),
    latent=maybe(_LATENTS),
    sinks=st.booleans(),
    vocab_size=maybe(one_of((1000, 32000))),
    eager_because=one_of((None, None, None, "its attention reads lengths on the host")),
)


@composite
def _speculatives(draw: DrawFn, scheduled: bool) -> Speculative:
    longest = draw(one_of((1, 2, 3, 4, 5, 6, 15)))
    schedule: tuple[tuple[int, int, int], ...] | ScheduleSource = (
        draw(_schedules(longest)) if draw(st.booleans()) else ()
    )
    if scheduled and draw(one_of((False, False, True))):
        schedule = ScheduleSource.MEASURED
    # Traffic that is drawn has no acceptance, which a measured schedule needs.
    given = schedule is ScheduleSource.MEASURED or draw(one_of((False, False, True)))
    method = draw(one_of(Method))
    roles = (Role.TARGET, Role.DRAFT_PREFILL)[: draw(one_of((0, 0, 0, 1, 2)))]
    return Speculative(
        method=method,
        num_tokens=longest,
        schedule=schedule,
        acceptance=draw(_acceptances(longest)) if given else (),
        model=draw(_DRAFT_MODELS),
        chain=draw(one_of(Chain)),
        # MTP modules draft one after another, so a spec with both is refused.
        parallel_drafting=draw(one_of((False, False, method is not Method.MTP))),
        # A profile has no times of decodes that vary.
        varying_decodes=() if schedule is ScheduleSource.MEASURED else roles,
    )


_SIZE_LISTS: SearchStrategy[tuple[int, ...]] = st.lists(counts(128), max_size=6).map(tuple)


@composite
def _measured_sizes(draw: DrawFn, objectives: bool) -> Sizes:
    """Draw the policy measured: for all roles, or without an objective for one."""
    objective = draw(maybe(one_of(("mean", "token", "p50", "p99", "regret")))) if objectives else None
    most = draw(maybe(one_of((1, 32, 100, 2048))))
    files = one_of((None, "traffic.yaml", "data/chat.yaml")) if objectives else st.none()
    return Sizes(
        policy=Policy.MEASURED,
        objective=objective,
        max_slowdown=draw(maybe(one_of((0.05, 0.5, 3.0)))) if objectives else None,
        traffic=draw(files),
        profile=draw(files),
        max_tokens=most,
        max_reqs=draw(maybe(counts())),
    )


@composite
def _sizes(draw: DrawFn) -> Sizes:
    """Draw any policy but measured with the options that it takes."""
    policy = draw(one_of(policy for policy in Policy if policy is not Policy.MEASURED))
    tokens = reqs = None
    # Explicit sizes must name some, of either kind of batch.
    if policy is Policy.EXPLICIT:
        tokens, reqs = draw(maybe(_SIZE_LISTS)), draw(maybe(_SIZE_LISTS))
        if not tokens and not reqs:
            tokens = (draw(counts()),)
    elif policy is Policy.VLLM:
        tokens = draw(maybe(_SIZE_LISTS))
    return Sizes(
        policy=policy,
        graphs=draw(st.integers(1, 12)) if policy is Policy.MINIMAX else None,
        num_tokens=tokens,
        num_reqs=reqs,
        max_tokens=draw(maybe(one_of((1, 32, 100, 2048)))),
        max_reqs=draw(maybe(counts())),
        padding=draw(maybe(st.booleans())) if policy in (Policy.SGLANG, Policy.TENSORRT_LLM) else None,
    )


@composite
def _role_specs(draw: DrawFn, layers: int, names: Sequence[str], measured: bool) -> RoleSpec:
    groups: list[GroupSpec] = []
    for number in range(draw(one_of((0, 1, 2, 3)))):
        left = layers - sum(group.layers for group in groups)
        if left == 0:
            break
        window, backend = draw(maybe(one_of((128, 4096)))), draw(maybe(one_of(names)))
        count = draw(st.integers(1, left))
        groups.append(
            GroupSpec(
                name=draw(one_of((f"group {number}", f"g{number}"))), layers=count, backend=backend, window=window
            )
        )
    # The groups of a role have all of its layers.
    if groups and (left := layers - sum(group.layers for group in groups)):
        groups[-1] = replace(groups[-1], layers=groups[-1].layers + left)
    return RoleSpec(
        backend=draw(maybe(one_of(names))),
        mode=draw(maybe(one_of(GraphMode))),
        sizes=draw(maybe(_measured_sizes(False) if measured else _sizes())),
        groups=tuple(groups),
    )


_MEMORIES = st.integers(0, 80).map(lambda n: n * (25 << 20)) | BYTE_COUNTS

_BUDGETS = st.just(Budget()) | st.builds(
    Budget,
    max_graphs=maybe(counts()),
    memory=maybe(_MEMORIES),
    seconds=maybe(one_of((0.1, 1, 2.5, 20, 1e9))),
    graphs=st.builds(KindGraphs, decode=maybe(counts()), mixed=maybe(counts())),
    memory_per_graph=one_of((25 << 20, 7 << 20, 1, 0)),
    seconds_per_graph=one_of((0.25, 0.05, 1, 1e-9)),
)

_AT_START = st.just(CaptureTiming())
_ON_FIRST_USE = st.builds(
    CaptureTiming, policy=st.just(CapturePolicy.LAZY), memory=_MEMORIES, seconds_per_minute=one_of((0.1, 1, 2.5, 60))
)
_CAPTURES = _AT_START | _AT_START | _ON_FIRST_USE

_LORAS = st.builds(Lora, max_active=counts(17), specialize=st.booleans())


@composite
def specs(
    draw: DrawFn,
    *,
    max_reqs: int = 512,
    max_tokens: int = 4096,
    backends: Sequence[str] = BACKENDS,
    measured: bool | None = False,
    scheduled: bool = False,
    varying: bool = True,
) -> Spec:
    """Return specs: any field of any block takes part.

    :param backends: the names of the backends that they choose from.
    :param measured: whether sizes are measured; None: sometimes.
    :param scheduled: whether schedules may be the word ``measured``, which takes measurements to plan too.
    :param varying: whether decodes may vary in length, which no engine takes.
    """
    measured = draw(one_of((True, False, False))) if measured is None else measured
    names = tuple(backends)
    tensor = draw(one_of((1, 1, 2, 3, 4)))
    model = draw(_models(tensor))
    speculative = draw(maybe(_speculatives(scheduled)))
    # Heads of a drafter that do not divide are replaced by the target's.
    if speculative is not None and any(speculative.head_problems(model, tensor)):
        speculative = replace(speculative, model=replace(speculative.model, num_heads=None, num_kv_heads=None))
    if speculative is not None and (measured or not varying):
        speculative = replace(speculative, varying_decodes=())
    # A draft model has the target's vocabulary: a spec with another one is refused.
    if speculative is not None and speculative.method is Method.DRAFT_MODEL:
        speculative = replace(speculative, model=replace(speculative.model, vocab_size=None))
    chain = speculative is not None and speculative.is_chain
    layers = dict.fromkeys(Role, speculative.model.num_layers if speculative else 0)
    # Recurrent layers are in no attention group.
    layers[Role.TARGET] = model.attention_layers
    roles = {}
    for role in Role:
        # A spec refuses settings of a role that never runs.
        if role is Role.TARGET or chain or (speculative is not None and role is Role.DRAFT_PREFILL):
            roles[role.value] = draw(_role_specs(layers[role], names, measured)) if draw(st.booleans()) else RoleSpec()
    return Spec(
        model=model,
        limits=draw(_limits(max_reqs, max_tokens, speculative.extra_slots if speculative else 0)),
        mode=draw(one_of(GraphMode)),
        backend=draw(one_of(names)),
        speculative=speculative,
        sizes=draw(_measured_sizes(True)) if measured else draw(_sizes()) if draw(st.booleans()) else Sizes(),
        roles=Roles(**roles),
        parallel=Parallel(
            data=draw(one_of((1, 1, 8))),
            tensor=tensor,
            sequence=draw(st.booleans()),
            decode_context=draw(one_of((1, 1, 2))),
        ),
        lora=draw(maybe(_LORAS)),
        piecewise=Piecewise(split_attention=draw(st.booleans()), capturable=draw(st.booleans())),
        budget=draw(_BUDGETS),
        pool=draw(one_of(Pool)),
        capture=draw(_CAPTURES),
        ignore=draw(one_of(((), (), ("CP012", "CP021")))),
    )
