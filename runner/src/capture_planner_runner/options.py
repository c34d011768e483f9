"""Options of execution, which a person gives, and the policy that follows from them and the plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import attrs

from capture_planner.errors import RunError
from capture_planner.modes import Refresh, Role
from capture_planner.plugins.registry import Registry
from capture_planner.records.backend import Attention, MetadataField
from capture_planner.records.plan import Plan, RolePlan
from capture_planner.records.text import counted


@attrs.frozen(kw_only=True)
class Options:
    """Checks and techniques of execution."""

    trust: bool = False
    """Replay without guards."""
    debug: bool = False
    """Check the bounds of every index field at every step; slow."""
    poison: bool = False
    """Overwrite buffers, outputs, workspaces and pools with NaN and out-of-range integers before
    every forward. A result that is still right does not depend on them."""
    strict: bool = False
    """Stop where a graph does not fit into memory, instead of dropping it."""
    replay: bool = True
    """Replay graphs. False: nothing is captured, and each batch runs what its graph would hold, at its
    padded extents: the same kernels on the same shapes, so any difference that remains is the capture's."""
    run_ahead: bool | None = None
    """Launch each step before the tokens of the previous one are read, so that a GPU has no pause
    between steps; None: on a GPU. ``ExecutionPolicy.behind`` says why not, where it cannot be."""
    drafts_on_device: bool | None = None
    """Verify, and fill the drafter's fields, on the device instead of waiting for the target's tokens
    on the host; None: on a GPU. Not where a backend of the drafter needs lengths on the host, nor where the first
    draft pass has rows of its own: of a draft model, and with parallel drafting."""
    acceptance: tuple[float, ...] = ()
    """Synthetic acceptance: the share of steps in which drafts 0 to i are all accepted, by i, whatever the target
    says, see ``serving.acceptance``. Tokens are then not the model's. Empty: greedy verification."""
    proposals: tuple[float, ...] = ()
    """Synthetic draft lengths: the share of steps in which a drafter proposes drafts 0 to i, by i; those that it makes
    beyond are not verified, as of a drafter that stops where it is unsure. Empty: it proposes all."""
    temperature: float = 0.0
    """Temperature at which target and drafter sample, from 0.01 on, see ``execution.sampling``; 0: the likeliest
    tokens."""
    top_p: float = 1.0
    """Probability that the likeliest tokens reach together which the target samples from."""
    seed: int = 0
    """Seed of sampling, synthetic acceptance and draft lengths. Each request has a seed of its own, of this one and its
    name."""
    compile: bool | None = None
    """Compile the layers of target and drafter, once for all sizes; None: on a GPU. On a CPU the operators are
    called as they were traced, which saves nothing. Ranks that share a model compile it the same way, or not at all."""
    compare: bool = False
    """Run each forward that a graph serves eagerly too, and stop at the first tensor that differs, with
    ``DifferenceError``. Poisons before every forward, and nothing runs ahead or drafts on the device."""


@attrs.frozen(kw_only=True)
class ExecutionPolicy:
    """Decisions for a whole run, made before anything is built."""

    options: Options
    """Options as given; with ``poison`` where graphs are compared."""
    behind: str
    """Why no step is launched before the tokens of the previous one are read; empty: it is, or it was not to be."""
    run_ahead: bool
    """A step may be launched before the tokens of the previous one are read. An input id may be negative: without a
    drafter ``-1 - i`` is the token that the previous step says after its row i; with one see ``updates.StepAhead``."""
    advance_in_graph: bool
    """A target graph of one token a request ends with the fields of the next step."""
    drafts_on_device: bool
    """Verification and the drafter's fields are computed on the device."""
    compile: bool
    """The layers of target and drafter are compiled."""
    draft_decodes_need_host: bool
    """A backend plans draft decodes on the host, which so must know their lengths."""

    @classmethod
    def of(cls, plan: Plan, registry: Registry, options: Options, *, is_gpu: bool) -> ExecutionPolicy:
        """Decide from what was asked for, and from what the plan and its backends can do.

        Raises ``RunError`` for options that leave nothing to compare, or no moment to do so.
        """
        if options.compare:
            wrong = {
                "replay": not options.replay,
                "run_ahead": options.run_ahead,
                "drafts_on_device": options.drafts_on_device,
            }
            for name in (name for name, is_wrong in wrong.items() if is_wrong):
                raise RunError(
                    f"compare runs an eager forward before each graph, and {name} is {getattr(options, name)}; "
                    "use one or the other"
                )
        refuse_sampling(options)
        refuse_acceptance(plan, options.acceptance)
        refuse_acceptance(plan, options.proposals, "--proposals")
        waiting = {role.role: needs_host(plan, role, registry) for role in plan.roles}
        # Both need the tokens of a step on the host before a graph can have the next one's.
        waits = plan.speculative is not None or plan.model.embeddings
        # Poison overwrites what the eager forward left, so that the graph cannot read it.
        options = attrs.evolve(options, poison=options.poison or options.compare)
        # If a first draft pass has its own rows, verification decides which of them are real.
        has_own_rows = plan.speculative is not None and plan.speculative.has_own_rows
        # The host alone fills how many positions of each request a rank has.
        is_shared = plan.parallel.decode_context > 1
        drafts_on_device = _chosen(options.drafts_on_device, is_gpu, options) and not (has_own_rows or is_shared)
        is_wanted = _chosen(options.run_ahead, is_gpu, options)
        behind = _behind(plan, options, waiting, drafts_on_device=drafts_on_device) if is_wanted else ""
        return cls(
            options=options,
            behind=behind,
            run_ahead=is_wanted and not behind,
            # Poison and bounds checks need the host's values in every field, and multimodal rope has
            # three positions a token, of which a graph advances none.
            advance_in_graph=not (
                waits or waiting[Role.TARGET] or options.debug or options.poison or plan.model.mrope or is_shared
            ),
            drafts_on_device=drafts_on_device,
            compile=is_gpu if options.compile is None else options.compile,
            draft_decodes_need_host=waiting.get(Role.DRAFT_DECODE, False),
        )


def _chosen(asked: bool | None, is_gpu: bool, options: Options) -> bool:
    return not options.compare and (is_gpu if asked is None else asked)


_BY_LENGTH = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "dcp_local_seq_lens")
"""Fields that follow from lengths, and that only the host fills."""


def _behind(plan: Plan, options: Options, waiting: Mapping[Role, bool], *, drafts_on_device: bool) -> str:
    """Return why each step waits for the tokens of the previous one; empty: it need not."""
    if plan.model.embeddings:
        return "the embeddings of a step are made from the tokens of the one before"
    if options.debug:
        return "debug checks the tokens of a step on the host"
    if plan.speculative is None:
        return ""
    if Role.TARGET in plan.speculative.varying_decodes:
        return "how many drafts a request has decides how many tokens it has in the next step"
    if options.proposals:
        return "draft lengths are drawn by the positions of accepted drafts, which only the host does"
    if not drafts_on_device:
        return "drafts are verified on the host, and how many are accepted decides the positions of the next step"
    hosts = [role.value for role, waits in waiting.items() if waits]
    if hosts:
        return f"a backend of {', '.join(hosts)} plans on the host, by lengths that depend on accepted drafts"
    declared = {field.name for role in plan.roles for fields in _fields_of(role) for field in fields}
    if by_length := sorted(declared.intersection(_BY_LENGTH)):
        return f"the host fills {', '.join(by_length)}, by lengths that depend on accepted drafts"
    if plan.model.mrope:
        return "the host fills mrope_positions, which depend on accepted drafts"
    if plan.parallel.data > 1:
        return "replicas agree on the graphs of a step once it is scheduled, and some graphs need the tokens before"
    return ""


def _fields_of(role: RolePlan) -> Iterator[tuple[MetadataField, ...]]:
    yield role.inputs
    yield from (group.padding.fields for group in role.groups)


def refuse_acceptance(plan: Plan, rates: tuple[float, ...], option: str = "--acceptance") -> None:
    """Raise ``RunError`` for rates that no run of the plan can have, see ``Options.acceptance``; none are fine.

    :param option: what gave them.
    """
    if not rates:
        return
    shown = ",".join(f"{rate:g}" for rate in rates)
    if plan.speculative is None:
        raise RunError(f"{option} {shown}: the plan has no drafter; plan with speculative, or leave it out")
    most = plan.speculative.num_tokens
    if len(rates) != most:
        raise RunError(
            f"{option} {shown}: {counted(len(rates), 'share')}, and the plan drafts {counted(most, 'token')}; "
            "give a share for each"
        )
    for number, (before, rate) in enumerate(itertools.pairwise((1.0, *rates))):
        if not 0.0 <= rate <= before:
            raise RunError(
                f"{option} {shown}: share {number} is {rate:g}, expected 0 to {before:g}: it is the share of steps "
                f"that have all of drafts 0 to {number}, so it never rises"
            )


def refuse_sampling(options: Options) -> None:
    """Raise ``RunError`` for a temperature or a top-p that nothing can be sampled by."""
    if options.temperature and not LEAST_TEMPERATURE <= options.temperature <= MOST_TEMPERATURE:
        raise RunError(
            f"temperature is {options.temperature:g}, expected 0 or {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}; 0 "
            "takes the likeliest token"
        )
    if not 0 < options.top_p <= 1:
        raise RunError(f"top_p is {options.top_p:g}, expected more than 0, and at most 1; 1 samples from all tokens")


LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 100.0
"""Temperatures at which float32 has probabilities that can be told apart."""


def needs_host(plan: Plan, role: RolePlan, registry: Registry) -> bool:
    """Say whether a backend of the role plans on the host before each step."""
    return any(
        registry[group.backend].refresh(
            role.role, Attention.of(plan, role.role, layers=group.layers, window=group.window), plan.environment
        )
        is Refresh.HOST
        for group in role.groups
    )
