"""How a plan is run: the options that a person gives, and the policy that follows from them and the plan."""

from __future__ import annotations

import itertools

import attrs

from capture_planner.errors import RunError
from capture_planner.modes import Refresh, Role
from capture_planner.plugins.registry import Registry
from capture_planner.records.backend import Attention
from capture_planner.records.plan import Plan, RolePlan
from capture_planner.records.text import counted


@attrs.frozen(kw_only=True)
class Options:
    """How carefully a plan is run."""

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
    between steps; None: on a GPU. Never with a drafter, whose verification needs the tokens,
    with embeddings, which are made from them, or with ``debug``."""
    drafts_on_device: bool | None = None
    """Verify, and fill the drafter's fields, on the device instead of waiting for the target's tokens
    on the host; None: on a GPU. Not where a backend of the drafter needs lengths on the host, nor where the first
    draft pass has rows of its own: of a draft model, and with parallel drafting."""
    acceptance: tuple[float, ...] = ()
    """Synthetic acceptance: the share of steps in which drafts 0 to i are all accepted, by i, whatever the target
    says, see ``serving.acceptance``. Tokens are then not the model's. Empty: greedy verification."""
    seed: int = 0
    """Of the synthetic acceptance."""
    compile: bool | None = None
    """Compile the layers of target and drafter, once for all sizes; None: on a GPU. On a CPU the operators are
    called as they were traced, which saves nothing. Ranks that share a model compile it alike, or not at all."""
    compare: bool = False
    """Run each forward that a graph serves eagerly too, and stop at the first tensor that differs, with
    ``DifferenceError``. Poisons before every forward, and nothing runs ahead or drafts on the device."""


@attrs.frozen(kw_only=True)
class ExecutionPolicy:
    """What is decided once for a run, before anything is built."""

    options: Options
    """As given; with ``poison`` where graphs are compared."""
    run_ahead: bool
    """An input id may be ``-1 - i``: the token that the previous step says after its row i."""
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
            _refuse_without_comparison(options)
        refuse_acceptance(plan, options.acceptance)
        waiting = {role.role: needs_host(plan, role, registry) for role in plan.roles}
        # Both need the tokens of a step on the host before the next one can be launched.
        waits = plan.speculative is not None or plan.model.embeddings
        options = attrs.evolve(options, poison=options.poison or options.compare)
        return cls(
            options=options,
            run_ahead=_chosen(options.run_ahead, is_gpu, options) and not (waits or options.debug),
            # Poison and bounds checks need the host's values in every field, and multimodal rope has
            # three positions a token, of which a graph advances none.
            advance_in_graph=not (waits or waiting[Role.TARGET] or options.debug or options.poison or plan.model.mrope),
            # Where a first draft pass has rows of its own, which ones are real depends on what verification keeps.
            drafts_on_device=_chosen(options.drafts_on_device, is_gpu, options)
            and not (plan.speculative is not None and plan.speculative.has_own_rows),
            compile=is_gpu if options.compile is None else options.compile,
            draft_decodes_need_host=waiting.get(Role.DRAFT_DECODE, False),
        )


def _chosen(asked: bool | None, is_gpu: bool, options: Options) -> bool:
    return not options.compare and (is_gpu if asked is None else asked)


def _refuse_without_comparison(options: Options) -> None:
    wrong = {"replay": not options.replay, "run_ahead": options.run_ahead, "drafts_on_device": options.drafts_on_device}
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise RunError(
            f"compare runs an eager forward before each graph, and {name} is {getattr(options, name)}; "
            "use one or the other"
        )


def refuse_acceptance(plan: Plan, rates: tuple[float, ...]) -> None:
    """Raise ``RunError`` for rates that no run of the plan can have, see ``Options.acceptance``; none are fine."""
    if not rates:
        return
    shown = ",".join(f"{rate:g}" for rate in rates)
    if plan.speculative is None:
        raise RunError(f"--acceptance {shown}: the plan has no drafter; plan with speculative, or leave it out")
    most = plan.speculative.num_tokens
    if len(rates) != most:
        raise RunError(
            f"--acceptance {shown}: {counted(len(rates), 'share')}, and the plan drafts {counted(most, 'token')}; "
            "give a share for each"
        )
    for number, (before, rate) in enumerate(itertools.pairwise((1.0, *rates))):
        if not 0.0 <= rate <= before:
            raise RunError(
                f"--acceptance {shown}: share {number} is {rate:g}, expected 0 to {before:g}: it is the share of steps "
                f"in which drafts 0 to {number} are all accepted, so it never rises"
            )


def needs_host(plan: Plan, role: RolePlan, registry: Registry) -> bool:
    """Say whether a backend of the role plans on the host before each step."""
    return any(
        registry[group.backend].refresh(
            role.role, Attention.of(plan, role.role, layers=group.layers, window=group.window), plan.environment
        )
        is Refresh.HOST
        for group in role.groups
    )
