"""Put a plan together with a model: buffers, caches, backends and bodies, each sized from the plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import torch

from capture_planner.errors import BackendError, RunError, class_and_message
from capture_planner.modes import Role
from capture_planner.plugins.backend import Executor, LayerCache, Reservation, RunnableBackend
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records.backend import Attention, MetadataField
from capture_planner.records.model import DataType, Method, Model, Speculative
from capture_planner.records.plan import Plan, RolePlan
from capture_planner_runner.execution import padding
from capture_planner_runner.execution.attention import GroupRun, RecurrentLayers, RoleAttention
from capture_planner_runner.execution.bodies import (
    Body,
    DraftDecodeBody,
    DraftPrefillBody,
    ModulesBody,
    ParallelDraftBody,
    TargetBody,
)
from capture_planner_runner.execution.context import ContextRanks
from capture_planner_runner.execution.fields import (
    SAMPLED_FIELDS,
    Extents,
    Fields,
    accepted_field,
    sampling_fields,
    tensor_of,
)
from capture_planner_runner.execution.padding import Bounds, Write
from capture_planner_runner.execution.role import ExecutionContext, ForwardObserver, RoleRun
from capture_planner_runner.execution.sampling import Sampler
from capture_planner_runner.execution.updates import DraftState, TokenFields, Updates, VerificationOutcome
from capture_planner_runner.graphs.graph import Grapher
from capture_planner_runner.models.protocols import Adapters, Drafter, TargetModel
from capture_planner_runner.numerics.eager_check import EagerCheck
from capture_planner_runner.numerics.record import ComparisonLog
from capture_planner_runner.options import ExecutionPolicy, Options
from capture_planner_runner.serving.inputs import DraftRows
from capture_planner_runner.serving.launching import DraftPasses
from capture_planner_runner.serving.states import PageFormat, allocated, layer_cache, state_caches

DTYPES = (DataType.BFLOAT16, DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT64)
"""The element types that the runner computes and caches in."""

Windows = Mapping[int, int | None]
"""The sliding window of each layer of a model that attends, in tokens; None: full attention."""


def kv_dtype_of(model: Model) -> torch.dtype:
    """Return the torch dtype of a model's KV cache: of FP8 E4M3, without scales; raises ``RunError`` for others."""
    kind = model.kv_dtype or model.dtype
    return torch.float8_e4m3fn if kind is DataType.FP8 and model.dtype is not kind else dtype_of(kind)


def dtype_of(kind: DataType) -> torch.dtype:
    """Return the torch dtype; raises ``RunError`` for those that the runner does not compute in."""
    if kind not in DTYPES:
        known = ", ".join(k.value for k in DTYPES)
        raise RunError(f"the plan's model is in {kind.value}; the runner computes in {known}")
    dtype: torch.dtype = getattr(torch, kind.value)
    return dtype


@attrs.frozen(kw_only=True, eq=False)
class Assembly:
    """The tensors, backends and bodies of a plan and its models."""

    policy: ExecutionPolicy
    roles: Mapping[Role, RoleRun]
    target: TargetBody
    drafting: DraftPasses | None
    """None without a drafter."""
    comparison: ComparisonLog | None
    """Notes the comparisons of graphs with eager forwards; None: nothing is compared."""


def assemble(
    plan: Plan,
    model: TargetModel,
    drafter: Drafter | None,
    registry: Registry,
    grapher: Grapher,
    *,
    pages: PageFormat,
    device: torch.device,
    options: Options,
    observer: ForwardObserver,
    adapters: Adapters | None = None,
) -> Assembly:
    """Allocate everything that the plan needs, once, and reserve its backends.

    Raises ``RunError`` where the plan, the model and the installed backends do not belong together.

    :param observer: of all roles; where graphs are compared, an ``EagerCheck`` of each role has it as its inner one.
    """
    refuse_planning_backends(plan, registry)
    # Before anything is allocated: what is refused costs no memory.
    policy = ExecutionPolicy.of(plan, registry, options, is_gpu=device.type == "cuda")
    most_drafts = 0 if plan.speculative is None else plan.speculative.num_tokens
    # The host that runs ahead does not know how many drafts the step before keeps: a draw for each number.
    places = 1 + most_drafts if policy.run_ahead else 1
    of_target = (*SAMPLED_FIELDS, accepted_field(places)) if options.acceptance else SAMPLED_FIELDS
    sampler = sampler_of(plan, options, model.vocab_size, device)
    of_drafter: tuple[MetadataField, ...] = ()
    if sampler is not None:
        no_draft = None if sampler.proposed is None else (len(sampler.proposed) - 1) * most_drafts
        of_target, of_drafter = (*of_target, *sampling_fields(no_draft)), sampling_fields(None)
    fields = {
        role.role: Fields(role, capacity_of(plan, pages), device, of_target if role.role is Role.TARGET else of_drafter)
        for role in plan.roles
    }
    apply, updates = _operations(device, list(fields.values()))
    token_fields = {
        role: TokenFields.of(each, pages.page_size, plan.model.max_model_len) for role, each in fields.items()
    }
    own, moving = fields[Role.TARGET], token_fields[Role.TARGET]
    target = _target_body(plan, model, drafter, own, moving, updates, policy, adapters, sampler)
    bodies: dict[Role, Body] = {Role.TARGET: target}
    if (plan.model.recurrent is None) == bool(model.state_widths) or (plan.model.recurrent and plan.states is None):
        planned = "no recurrent layers" if plan.model.recurrent is None else "recurrent layers"
        without = "" if plan.states or not plan.model.recurrent else ", and no pool for their states"
        raise RunError(
            f"model.recurrent: the plan has {planned}{without}; {model.name} has states of {sum(model.state_widths)} "
            "elements; plan the model that is run"
        )
    # An edited plan can leave only the row for padding.
    if plan.states is not None and plan.states.rows < _FEWEST_STATES:
        raise RunError(f"states.rows: {plan.states.rows} leaves no row for a request; plan it again")
    recurrent = RecurrentLayers(own, state_caches(plan, model.state_widths, dtype_of(plan.model.dtype), device))
    # By whether it is the drafter's: its two roles share layers, and with them caches and windows.
    windows: dict[bool, Windows] = {False: model.windows}
    drafting = None
    if drafter is not None and plan.speculative is not None:
        count, dtype = plan.limits.max_num_reqs, dtype_of(plan.model.dtype)
        drafting = DraftPasses(
            rows=DraftRows.of(plan.speculative, drafter.mask_token),
            state=DraftState.make(count, most_drafts, drafter.hidden_size, dtype, device, is_carried=policy.run_ahead),
            outcome=VerificationOutcome.make(count, most_drafts, device) if policy.run_ahead else None,
            target=target,
            prefill=fields[Role.DRAFT_PREFILL],
            token_fields=token_fields,
            updates=updates,
            places=places,
        )
        bodies |= _draft_bodies(plan, plan.speculative, drafter, fields, drafting)
        windows[True] = drafter.windows
    ranks = ContextRanks.of(plan, model.among, pages.page_size)
    reserved = reserve_all(plan, windows, fields, registry, pages, device, context_rank=ranks.rank)
    context = ExecutionContext(
        grapher=grapher,
        policy=policy,
        bounds=Bounds(
            reqs=plan.limits.max_num_reqs,
            pages=pages.num_pages,
            slots=pages.slots,
            states=plan.states.rows if plan.states else 1,
            positions=plan.model.max_model_len,
            vocabulary=model.vocab_size,
            workspace=max((group.workspace.device for role in plan.roles for group in role.groups), default=0),
        ),
        page_size=pages.page_size,
        apply=apply,
    )
    comparison = ComparisonLog() if options.compare else None
    roles = {}
    for role in plan.roles:
        mine = fields[role.role]
        attention = RoleAttention(role.role, reserved[role.role], mine, updates, plan.model.max_model_len, ranks)
        largest = max((entry.num_tokens for entry in role.entries), default=0)
        # The check runs each pass again, so it wraps what runs; an observer only watches.
        check = None if comparison is None else EagerCheck(comparison, largest, observer)
        # No drafter has recurrent layers.
        of_role = RecurrentLayers(mine, ()) if role.role.is_drafter else recurrent
        body = bodies[role.role]
        roles[role.role] = RoleRun(role, body, mine, attention, of_role, context, check or observer, wrapper=check)
    return Assembly(policy=policy, roles=roles, target=target, drafting=drafting, comparison=comparison)


def _target_body(
    plan: Plan,
    model: TargetModel,
    drafter: Drafter | None,
    fields: Fields,
    token_fields: TokenFields,
    updates: Updates,
    policy: ExecutionPolicy,
    adapters: Adapters | None,
    sampler: Sampler | None,
) -> TargetBody:
    width, aux_layers = model.hidden_size, () if drafter is None else drafter.aux_layers
    device = fields["positions"].device
    return TargetBody(
        model=model,
        fields=fields,
        hidden=_zeros(plan, fields, width),
        aux=_zeros(plan, fields, len(aux_layers) * width) if aux_layers else None,
        tokens=torch.zeros(fields.capacity.tokens, dtype=torch.int64, device=device),
        updates=updates,
        token_fields=token_fields,
        aux_layers=aux_layers,
        embeddings=_zeros(plan, fields, width) if plan.model.embeddings else None,
        ahead=policy.run_ahead and drafter is None,
        advances=policy.advance_in_graph,
        adapters=adapters,
        sampler=sampler,
    )


def sampler_of(plan: Plan, options: Options, vocab_size: int, device: torch.device) -> Sampler | None:
    """Return what draws tokens, with room for what drafts are drawn from; None: nothing is sampled."""
    if not options.temperature:
        return None
    proposed = None
    if plan.speculative is not None:
        # One row for padding, and one that stays zero, for rows that no draft follows.
        shape = (plan.limits.max_num_reqs + 2, plan.speculative.num_tokens, vocab_size)
        proposed = allocated(shape, torch.float32, device, "what drafts are sampled from")
    return Sampler(temperature=options.temperature, top_p=options.top_p, seed=options.seed, proposed=proposed)


def _draft_bodies(
    plan: Plan, speculative: Speculative, drafter: Drafter, fields: Mapping[Role, Fields], drafting: DraftPasses
) -> dict[Role, Body]:
    """Return the bodies of the first draft pass and, in a chain, of the draft decodes after it."""
    prefill, state, updates = fields[Role.DRAFT_PREFILL], drafting.state, drafting.updates
    # A head proposes the token two positions after the state that it reads; a draft model, the next one.
    distance = 1 + (speculative.method is not Method.DRAFT_MODEL)
    kind = DraftPrefillBody
    # Modules and parallel drafts are all made in the first pass; nothing decodes after it.
    if not speculative.is_chain:
        kind = ModulesBody if speculative.is_modules else ParallelDraftBody
    hidden = _zeros(plan, prefill, drafter.hidden_size)
    bodies: dict[Role, Body] = {
        Role.DRAFT_PREFILL: kind(
            drafter, prefill, state, updates, distance, drafting.target, hidden, sampler=drafting.target.sampler
        )
    }
    if speculative.is_chain:
        decode, advancing = fields[Role.DRAFT_DECODE], drafting.token_fields[Role.DRAFT_DECODE]
        bodies[Role.DRAFT_DECODE] = DraftDecodeBody(
            drafter, decode, state, updates, distance, advancing, sampler=drafting.target.sampler
        )
    return bodies


def kv_cache_bytes(roles: Iterable[RoleRun]) -> int:
    """Return the bytes of the KV cache, over all layers of target and drafter, and of the recurrent states."""
    roles = tuple(roles)
    caches = (cache for role in roles for _, cache in role.attention.caches())
    tensors = [tensor for cache in caches for tensor in (cache.keys, cache.values)]
    tensors += [cache.states for role in roles for cache in role.recurrent.caches]
    return _bytes(tensors)


def buffer_bytes(roles: Iterable[RoleRun]) -> int:
    """Return the bytes of fields, outputs and workspaces."""
    roles = tuple(roles)
    return _bytes(tensor_of(held) for role in roles for held in role.persistent()) - kv_cache_bytes(roles)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Add up tensors, each counted once."""
    # By address: roles that share caches yield each of them twice.
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


_FEWEST_STATES = 2
"""Rows: one for padding, and one."""


def _zeros(plan: Plan, fields: Fields, width: int) -> torch.Tensor:
    """Allocate ``[max tokens, width]`` in the model's dtype, where the fields are."""
    device = fields["positions"].device
    return torch.zeros(fields.capacity.tokens, width, dtype=dtype_of(plan.model.dtype), device=device)


def _operations(device: torch.device, fields: Sequence[Fields]) -> tuple[Callable[[Sequence[Write]], None], Updates]:
    """Return what fills and pads, and what moves on: a kernel each on a GPU, arrays and torch on a host."""
    if device.type != "cuda":
        return padding.apply, Updates()
    from capture_planner_runner.execution.fused import FusedPadding
    from capture_planner_runner.execution.fused_updates import FusedUpdates

    size, count = sum(found.memory for found in fields), sum(len(tuple(found)) for found in fields)
    return FusedPadding(device, size, count).apply, FusedUpdates()


def capacity_of(plan: Plan, pages: PageFormat) -> Extents:
    """Return the largest padded extents: of any entry, and of any batch that the limits admit."""
    entries = [entry for role in plan.roles for entry in role.entries]
    return Extents(
        # By all entries: vLLM 0.33 sizes buffers by its first capture, and fails where a later graph is larger.
        tokens=max(plan.limits.max_num_tokens, *(e.num_tokens for e in entries), 0),
        reqs=max(plan.limits.max_num_reqs, *(e.num_reqs or 0 for e in entries), 0),
        pages=pages.pages(plan.model.max_model_len),
    )


def reserve_all(
    plan: Plan,
    windows: Mapping[bool, Windows],
    fields: Mapping[Role, Fields],
    registry: Registry,
    pages: PageFormat,
    device: torch.device,
    *,
    context_rank: int = 0,
) -> dict[Role, list[GroupRun]]:
    """Reserve the backend of each group of each role; where one refuses, release those before it.

    Each layer has a cache, of the target and (key True) of the drafter, whose roles share it.
    """
    dtype = kv_dtype_of(plan.model)
    caches: dict[bool, dict[int, LayerCache]] = {is_drafter: {} for is_drafter in windows}
    reserved: dict[Role, list[GroupRun]] = {role.role: [] for role in plan.roles}
    try:
        for role in plan.roles:
            mine = caches[role.role.is_drafter]
            for group, layers in zip(role.groups, layers_of(role, windows[role.role.is_drafter]), strict=True):
                attention = Attention.of(plan, role.role, layers=group.layers, window=group.window)
                # Keys and values of a layer are one tensor where the backend's kernels read them so.
                packed = getattr(registry[group.backend].backend, "packs_cache", False)
                for layer in layers:
                    # The drafter's two roles attend in the same layers, and share the cache of each.
                    if layer not in mine:
                        mine[layer] = layer_cache(attention, pages, dtype, device, packed=packed)
                registered, of_group = registry[group.backend], {layer: mine[layer] for layer in layers}
                label, size = _label(registered), group.workspace.device
                workspace = allocated((size,), torch.uint8, device, f"the workspace that {label} declares")
                reservation = Reservation(
                    role=role.role,
                    group=group.name,
                    attention=attention,
                    environment=plan.environment,
                    entries=role.entries,
                    limits=plan.limits,
                    caches=of_group,
                    page_size=pages.page_size // attention.decode_context,  # this rank's part of a page
                    context_rank=context_rank,
                    fields={name: each.tensor for name, each in fields[role.role].by_group[group.name].items()},
                    workspace=workspace,
                    pinned=torch.zeros(group.workspace.pinned, dtype=torch.uint8, pin_memory=device.type == "cuda"),
                    device=device,
                )
                executor = _executor(registered, reservation)
                reserved[role.role].append(
                    GroupRun(plan=group, executor=executor, caches=of_group, workspace=workspace, label=label)
                )
    except BaseException:
        for group_run in itertools.chain.from_iterable(reserved.values()):
            group_run.executor.release()
        raise
    return reserved


def _executor(registered: RegisteredBackend, reservation: Reservation) -> Executor:
    """Let a backend reserve. Raises ``BackendError`` with its name where it breaks."""
    label, where = _label(registered), f"reserve ({reservation.role.value}, group {reservation.group})"
    assert isinstance(registered.backend, RunnableBackend), "refuse_planning_backends comes first"
    try:
        executor: Executor = registered.backend.reserve(reservation)
    # It names itself already.
    except BackendError:
        raise
    except Exception as error:
        message = class_and_message(error)
        raise BackendError(f"{label} broke in {where}: {message}; tell its authors") from error
    # A rank with a part of the context returns partial results, which the ranks merge.
    attend = "attend" if reservation.attention.decode_context == 1 else "attend_part"
    missing = [call for call in ("prepare", attend, "layout", "release") if not hasattr(executor, call)]
    if missing:
        raise BackendError(
            f"{label} returned {executor!r} from {where}, which has no {', '.join(missing)}; tell its authors"
        )
    return executor


def _label(registered: RegisteredBackend) -> str:
    return f"the backend {registered.name!r} ({registered.distribution} {registered.version})"


def windows_of(role: RolePlan) -> Windows:
    """Return the window of each layer that attends as a plan has them: group by group."""
    return dict(enumerate(group.window for group in role.groups for _ in range(group.layers)))


def layers_of(role: RolePlan, windows: Windows) -> list[list[int]]:
    """Return the layers of each group: in the model's order, told apart by their window."""
    left = list(windows)
    found = []
    for group in role.groups:
        alone = len(role.groups) == 1
        fitting = [layer for layer in left if alone or windows[layer] == group.window]
        if len(fitting) < group.layers or (alone and len(fitting) != group.layers):
            what = "of full attention" if group.window is None else f"with a window of {group.window}"
            raise RunError(
                f"{role.role.value}: the group {group.name} has {group.layers} layers, and the model has "
                f"{len(fitting)} {'in all' if alone else what}; plan the model that is run"
            )
        # Groups of one window split its layers in their order, so each takes only what it was planned for.
        found.append(fitting[: group.layers])
        left = [layer for layer in left if layer not in found[-1]]
    if left:
        raise RunError(f"{role.role.value}: no group of the plan has layer {left[0]} of the model")
    return found


def refuse_planning_backends(plan: Plan, registry: Registry) -> None:
    """Refuse a backend that executes nothing, or declares other fields than when the plan was made."""
    for role in plan.roles:
        for group in role.groups:
            registered = registry[group.backend]
            if not isinstance(registered.backend, RunnableBackend):
                raise RunError(
                    f"{_label(registered)} plans and does not execute: it has no reserve; see "
                    "docs/extending/backend-contract.md"
                )
            attention = Attention.of(plan, role.role, layers=group.layers, window=group.window)
            now = registered.padding(role.role, attention, plan.environment)
            if now != group.padding:
                names = {field.name for field in set(now.fields) ^ set(group.padding.fields)}
                raise RunError(
                    f"{role.role.value}, group {group.name}: the plan was made with {group.distribution} "
                    f"{group.version}, and {registered.distribution} {registered.version} declares other fields "
                    f"({', '.join(sorted(names))}); plan it again"
                )
