"""Put a plan together with a model: buffers, caches, backends and bodies, each sized from the plan."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import BackendError, RunError
from capture_planner.modes import Role
from capture_planner.plugins.registry import Registered, Registry
from capture_planner.records.backend import Attention
from capture_planner.records.model import DataType
from capture_planner.records.plan import GroupPlan, Plan, RolePlan
from capture_planner.runtime.eager_check.record import Comparing
from capture_planner.runtime.eager_check.role import ComparedRole
from capture_planner.runtime.execution import padding
from capture_planner.runtime.execution.bodies import Body, DraftDecodeBody, DraftPrefillBody, TargetBody
from capture_planner.runtime.execution.fields import SAMPLED_FIELDS, Extents, Fields, tensor_of
from capture_planner.runtime.execution.padding import Bounds, Write
from capture_planner.runtime.execution.role import GroupRun, Options, RoleRun
from capture_planner.runtime.execution.updates import DraftState, Moving, TorchUpdates, Updates
from capture_planner.runtime.executor import LayerCache, Reservation, Runnable
from capture_planner.runtime.graphs.graph import Grapher
from capture_planner.runtime.models.protocols import Drafter, TargetModel
from capture_planner.runtime.serving import kv

DTYPES = {
    DataType.BFLOAT16: torch.bfloat16,
    DataType.FLOAT16: torch.float16,
    DataType.FLOAT32: torch.float32,
    DataType.FLOAT64: torch.float64,
}
"""The element types that the runner computes and caches in."""


@attrs.frozen(kw_only=True, eq=False)
class Parts:
    """What a plan is executed with."""

    roles: Mapping[Role, RoleRun]
    target: TargetBody
    state: DraftState | None
    apply: Callable[[Sequence[Write]], None]
    """Brings buffers of any number of roles up to date."""
    updates: Updates
    moving: Mapping[Role, Moving]
    """Each role's fields that go on by a token."""
    drafts_on_device: bool
    """Whether verification and the drafter's fields are worked out where the target's answers are."""
    kv_cache: int
    """Bytes of the KV cache, over all layers of target and drafter."""
    findings: Comparing | None
    """What graphs are compared with eager forwards for; None: they are not."""

    @property
    def buffers(self) -> int:
        """Bytes of fields, outputs and workspaces, each counted once."""
        seen: dict[int, int] = {}
        for role in self.roles.values():
            caches = {
                t.data_ptr() for g in role.groups for c in g.caches.values() for t in (c.keys, c.values)
            }
            for held in role.persistent():
                tensor = tensor_of(held)
                if tensor.data_ptr() not in caches:
                    seen[tensor.data_ptr()] = tensor.nbytes
        return sum(seen.values())


def dtype_of(kind: DataType) -> torch.dtype:
    """Return the torch dtype; raises ``RunError`` for those that the runner does not compute in."""
    if kind not in DTYPES:
        known = ", ".join(k.value for k in DTYPES)
        raise RunError(f"the plan's model is in {kind.value}; the runner computes in {known}")
    return DTYPES[kind]


def assemble(
    plan: Plan,
    model: TargetModel,
    drafter: Drafter | None,
    registry: Registry,
    grapher: Grapher,
    *,
    pages: kv.PageFormat,
    device: torch.device,
    options: Options,
) -> Parts:
    """Allocate everything that the plan needs, once, and reserve its backends.

    Raises ``RunError`` where the plan, the model and the installed backends do not belong together.
    """
    dispatcher = Dispatcher(plan)
    dtype = dtype_of(plan.model.dtype)
    capacity = capacity_of(plan, pages)
    bounds = Bounds(
        reqs=plan.limits.max_num_reqs,
        pages=pages.num_pages,
        slots=pages.slots,
        positions=plan.model.max_model_len,
        vocabulary=model.vocab_size,
        workspace=max((group.workspace.device for role in plan.roles for group in role.groups), default=0),
    )
    fields = {
        role.role: Fields(role, capacity, device, SAMPLED_FIELDS if role.role is Role.TARGET else ())
        for role in plan.roles
    }

    def zeros(width: int) -> torch.Tensor:
        return torch.zeros(capacity.tokens, width, dtype=dtype, device=device)

    apply, updates = _operations(device, list(fields.values()))
    moving = {
        role: Moving.of(found, pages.page_size, plan.model.max_model_len) for role, found in fields.items()
    }
    aux_layers = () if drafter is None else drafter.aux_layers
    target = TargetBody(
        model=model,
        fields=fields[Role.TARGET],
        hidden=zeros(model.hidden_size),
        aux=zeros(len(aux_layers) * model.hidden_size) if aux_layers else None,
        tokens=torch.zeros(capacity.tokens, dtype=torch.int64, device=device),
        updates=updates,
        moving=moving[Role.TARGET],
        aux_layers=aux_layers,
        embeddings=zeros(model.hidden_size) if plan.model.embeddings else None,
    )
    bodies: dict[Role, Body] = {Role.TARGET: target}
    state = None
    if drafter is not None and plan.speculative is not None:
        state = DraftState.make(
            plan.limits.max_num_reqs, plan.speculative.num_tokens, drafter.hidden_size, dtype, device
        )
        bodies[Role.DRAFT_PREFILL] = DraftPrefillBody(
            drafter, fields[Role.DRAFT_PREFILL], target, zeros(drafter.hidden_size), state, updates
        )
        bodies[Role.DRAFT_DECODE] = DraftDecodeBody(
            drafter, fields[Role.DRAFT_DECODE], state, updates, moving[Role.DRAFT_DECODE]
        )
    for role in plan.roles:
        for group in role.groups:
            refuse_backend(plan, role, group, registry[group.backend])
    caches = caches_of(plan, model, drafter, pages, device)
    reserved: dict[Role, list[GroupRun]] = {}
    try:
        for role in plan.roles:
            mine = reserved.setdefault(role.role, [])
            mine.extend(
                reserved_groups(plan, role, model, caches, fields[role.role], registry, pages, device)
            )
    except BaseException:
        for group_run in itertools.chain.from_iterable(reserved.values()):
            group_run.executor.release()
        raise
    findings = Comparing() if options.compare else None
    make = RoleRun if findings is None else functools.partial(ComparedRole, findings=findings)
    roles = {
        role.role: make(
            role,
            bodies[role.role],
            fields[role.role],
            reserved[role.role],
            dispatcher=dispatcher,
            grapher=grapher,
            page_size=pages.page_size,
            bounds=bounds,
            options=options,
            apply=apply,
            updates=updates,
        )
        for role in plan.roles
    }
    if drafter is None and target.embeddings is None:
        target.ahead = device.type == "cuda" if options.run_ahead is None else options.run_ahead
        target.ahead &= not options.debug
        target.goes_on = (
            roles[Role.TARGET].goes_on_alone
            and not (options.debug or options.poison)
            and not plan.model.mrope
        )
    return Parts(
        roles=roles,
        target=target,
        state=state,
        apply=apply,
        updates=updates,
        moving=moving,
        drafts_on_device=device.type == "cuda"
        if options.drafts_on_device is None
        else options.drafts_on_device,
        findings=findings,
        kv_cache=sum(c.keys.nbytes + c.values.nbytes for found in caches.values() for c in found),
    )


def _operations(
    device: torch.device, fields: Sequence[Fields]
) -> tuple[Callable[[Sequence[Write]], None], Updates]:
    """Return what fills and pads, and what moves on: a kernel each on a GPU, arrays and torch on a host."""
    if device.type != "cuda":
        return padding.apply, TorchUpdates()
    from capture_planner.runtime.execution.fused import FusedPadding
    from capture_planner.runtime.execution.fused_updates import FusedUpdates

    size, count = sum(found.memory for found in fields), sum(len(tuple(found)) for found in fields)
    return FusedPadding(device, size, count).apply, FusedUpdates()


def capacity_of(plan: Plan, pages: kv.PageFormat) -> Extents:
    """Return the largest padded extents: of any entry, and of any batch that the limits admit."""
    entries = [entry for role in plan.roles for entry in role.entries]
    return Extents(
        tokens=max(plan.limits.max_num_tokens, *(e.num_tokens for e in entries), 0),
        reqs=max(plan.limits.max_num_reqs, *(e.num_reqs or 0 for e in entries), 0),
        pages=pages.pages(plan.model.max_model_len),
    )


def caches_of(
    plan: Plan, model: TargetModel, drafter: Drafter | None, pages: kv.PageFormat, device: torch.device
) -> dict[bool, tuple[LayerCache, ...]]:
    """Make the cache of each layer, of the target and (key True) of the drafter, which both its
    roles share.
    """
    dtype = dtype_of(plan.model.kv_dtype or plan.model.dtype)
    made = {}
    for role, layers in (
        (Role.TARGET, model.num_layers),
        (Role.DRAFT_DECODE, drafter and drafter.num_layers),
    ):
        shape = Attention.of(plan, role, layers=layers or 1, window=None)
        made[role.is_drafter] = tuple(kv.layer_cache(shape, pages, dtype, device) for _ in range(layers or 0))
    return made


def reserved_groups(
    plan: Plan,
    role: RolePlan,
    model: TargetModel,
    caches: Mapping[bool, Sequence[LayerCache]],
    fields: Fields,
    registry: Registry,
    pages: kv.PageFormat,
    device: torch.device,
) -> Iterator[GroupRun]:
    """Reserve the backend of each group of a role."""
    of_role = caches[role.role.is_drafter]
    windows = (None,) * len(of_role) if role.role.is_drafter else model.windows
    for group, layers in zip(role.groups, layers_of(role, windows), strict=True):
        registered = registry[group.backend]
        backend, who = registered.backend, _who(registered)
        assert isinstance(backend, Runnable), "what does not execute was refused before"
        size = group.workspace.device
        workspace = kv.allocated((size,), torch.uint8, device, f"the workspace that {who} declares")
        mine = {layer: of_role[layer] for layer in layers}
        reservation = Reservation(
            role=role.role,
            group=group.name,
            attention=Attention.of(plan, role.role, layers=group.layers, window=group.window),
            environment=plan.environment,
            entries=role.entries,
            limits=plan.limits,
            caches=mine,
            page_size=pages.page_size,
            fields={name: buffer.tensor for name, buffer in fields.by_group[group.name].items()},
            workspace=workspace,
            pinned=torch.zeros(group.workspace.pinned, dtype=torch.uint8, pin_memory=device.type == "cuda"),
            device=device,
        )
        try:
            executor = backend.reserve(reservation)
        except BackendError:
            raise
        except Exception as error:
            says = " ".join(f"{type(error).__name__}: {error}".split())
            raise BackendError(
                f"{who} broke in reserve ({role.role.value}, group {group.name}): {says}; tell its authors"
            ) from error
        missing = [call for call in ("prepare", "attend", "layout", "release") if not hasattr(executor, call)]
        if missing:
            raise BackendError(
                f"{who} returned {executor!r} from reserve ({role.role.value}, group {group.name}), which has "
                f"no {', '.join(missing)}; tell its authors"
            )
        yield GroupRun(
            plan=group,
            executor=executor,
            caches=mine,
            workspace=workspace,
            who=who,
            refresh=registered.refresh(role.role, reservation.attention, plan.environment),
        )


def _who(registered: Registered) -> str:
    return f"the backend {registered.name!r} ({registered.distribution} {registered.version})"


def layers_of(role: RolePlan, windows: Sequence[int | None]) -> list[list[int]]:
    """Return the layers of each group: in the model's order, told apart by their window."""
    left = list(range(len(windows)))
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
        found.append(fitting[: group.layers])
        left = [layer for layer in left if layer not in found[-1]]
    if left:
        raise RunError(f"{role.role.value}: no group of the plan has layer {left[0]} of the model")
    return found


def refuse_backend(plan: Plan, role: RolePlan, group: GroupPlan, registered: Registered) -> None:
    """Refuse a backend that executes nothing, or declares other fields than when the plan was made."""
    if not isinstance(registered.backend, Runnable):
        raise RunError(
            f"{_who(registered)} plans and does not execute: it has no reserve; see docs/extending/backend-contract.md"
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
