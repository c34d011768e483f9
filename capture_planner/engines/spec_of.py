"""A spec from the flags of an engine: the deployment that an emulation describes, with sizes to be chosen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Any

import attrs

from capture_planner import codec
from capture_planner.engines import checkpoints
from capture_planner.engines.emulation import BY_MODEL, CapturedGraph, Emulation
from capture_planner.engines.engine import Engine
from capture_planner.errors import CapturePlannerError, EngineError, InvalidValue
from capture_planner.modes import Chain, GraphMode, Role
from capture_planner.planning.from_config import spec_text
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.model import DataType, Model
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Policy, Roles, RoleSpec, Sizes, Spec
from capture_planner.records.text import counted

BACKEND = "flash_attention"
"""The attention backend of a spec where the engine's own has no plugin here."""

PLAIN_MODEL = Model(
    name="an 8B model",
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    max_model_len=131072,
)
"""Dimensions for a deployment whose model is not known here."""

_MODEL = ("model", "model_path")
_LENGTH = ("max_model_len", "context_length")


@attrs.frozen(kw_only=True)
class DerivedSpec:
    """A spec of what an engine runs, and what had to be assumed for it."""

    spec: Spec
    assumptions: tuple[str, ...] = ()


def spec_of(emulation: Emulation, engine: Engine | None, like: Model, name: str | None = None) -> DerivedSpec:
    """Return the spec of the deployment that an engine's flags, or an observation, describe.

    Limits, modes, speculation, adapters and ranks are the engine's. Sizes and budget are left at their defaults.

    :param engine: None: its attention backends have no names here.
    :param like: the model whose dimensions are taken where the engine's model is not known here.
    :param name: the model's name; None: as the settings have it, or as ``like`` has it.
    :raises EngineError: no spec can describe the deployment.
    """
    # Plans have draft decodes of one token a request, so sizes for others cannot be planned.
    if any(family.query_len != 1 for family in emulation.drafts or ()):
        message = "drafts several tokens of a request in one pass, and no plan has such graphs"
        raise EngineError(f"{emulation.engine} {message}; its sizes can only be set by its own flags")
    if Role.TARGET not in emulation.modes:
        raise EngineError(f"{emulation.engine}: nothing of the target was observed; give a whole observation")
    assumptions: list[str] = []
    base = _base(emulation, like, name, assumptions)
    if any(graph.microbatches > 1 for graph in emulation.graphs):
        says = f"{emulation.engine} splits batches into microbatches; the plan has graphs of whole batches alone"
        assumptions.append(says)
    wide = emulation.speculative
    if wide is not None:
        # Engines do not say how they chain drafts; their graphs do.
        fused = any(graph.entry.draft_steps is not None for graph in emulation.graphs)
        wide = replace(wide, chain=Chain.FUSED if fused else Chain.SINGLE)
    try:
        spec = replace(
            base,
            limits=emulation.limits,
            mode=emulation.modes[Role.TARGET],
            backend=_backend(emulation, engine, assumptions),
            speculative=wide,
            roles=Roles(**(_by_role(emulation) | {Role.TARGET.value: base.roles.target})),
            parallel=emulation.parallel,
            lora=emulation.lora,
        )
    except InvalidValue as error:
        reasons = "; ".join(map(str, error.problems))
        raise EngineError(f"{emulation.engine} may run it, but no spec can say it: {reasons}; tune a SPEC") from None
    return DerivedSpec(spec=spec, assumptions=tuple(assumptions))


def _by_role(emulation: Emulation) -> dict[str, RoleSpec]:
    """Return how the drafter's roles differ from the target; a role that the engine does not run has no graphs."""
    if emulation.speculative is None:
        return {}
    modes, target = emulation.modes, emulation.modes[Role.TARGET]
    found = {role: modes.get(role, GraphMode.NONE) for role in (Role.DRAFT_PREFILL, Role.DRAFT_DECODE)}
    usual = {Role.DRAFT_PREFILL: target, Role.DRAFT_DECODE: GraphMode.FULL_DECODE_ONLY}
    return {role.value: RoleSpec(mode=mode) for role, mode in found.items() if mode is not usual[role]}


def _backend(emulation: Emulation, engine: Engine | None, assumptions: list[str]) -> str:
    theirs = _setting(emulation, "attention_backend")
    ours = {name: own for own, name in (engine.backends if engine else ())}.get(str(theirs))
    if ours is not None:
        return ours
    owner = f"{emulation.engine}'s attention backend"
    says = f"{owner} {theirs} has" if theirs else f"{owner}s have"
    assumptions.append(f"{says} no plugin here: the plan is made for {BACKEND}, which decides how far graphs go")
    return BACKEND


def _base(emulation: Emulation, like: Model, name: str | None, assumptions: list[str]) -> Spec:
    """Return a spec with the engine's model: by name that of ``like``, by its configuration, or else like it."""
    # TensorRT-LLM's settings have no model: it is the first word.
    first = [word for word in emulation.command[:1] if not word.startswith("-")]
    name = name or next(map(str, (*_settings(emulation, _MODEL), *first)), None)
    if name is None:
        name = like.name
        assumptions.append(f"no model is named; the plan is made for {name}")
    spec = Spec(model=like, limits=emulation.limits, backend=BACKEND)
    # The dimensions of ``like`` are its own only under its own name.
    if name != like.name:
        spec = _configured(name, like, assumptions) or replace(spec, model=replace(like, name=_plain(name)))
    length = next(_settings(emulation, _LENGTH), None)
    # An observation has its settings as text.
    changes: dict[str, Any] = {"max_model_len": int(str(length))} if str(length).isdigit() else {}
    dtype = _setting(emulation, "dtype")
    if dtype in {each.value for each in DataType}:
        changes["dtype"] = DataType(dtype)
    return replace(spec, model=replace(spec.model, **changes))


def _configured(name: str, like: Model, assumptions: list[str]) -> Spec | None:
    """Return the spec of a model whose configuration is here; None for an unknown model."""
    checkpoint = checkpoints.find(name)
    if checkpoint.source == checkpoints.ASSUMED:
        says = f"{name} is no local folder and no known model; the plan states the dimensions of {like.name} for it"
        assumptions.append(says)
        return None
    config = dict(checkpoint.config)
    # Known models list what the engines' rules read, which the number of layers is not part of.
    if not any(key in checkpoint.text for key in ("num_hidden_layers", "n_layer")):
        assumptions.append(f"the number of layers of {name} is not known here; the plan states {like.num_layers}")
        config["num_hidden_layers"] = like.num_layers
    try:
        return codec.loads(spec_text(config, "its configuration", _plain(name)), Spec)
    except CapturePlannerError as error:
        assumptions.append(f"{name}: {error}; the plan states the dimensions of {like.name} for it")
        return None


def _plain(name: str) -> str:
    """Return a model's name as a plan can have it: of a path the last part, without characters that no name has."""
    # A folder on one machine says nothing on another.
    last = PurePath(name).name if name.startswith(("/", ".", "~", "$")) else name
    return re.sub(r"[^A-Za-z0-9._/+ -]+", "-", last).lstrip("._/+ -")[:128] or "model"


def _setting(emulation: Emulation, name: str) -> Any:
    return next(_settings(emulation, (name,)), None)


def _settings(emulation: Emulation, names: tuple[str, ...]) -> Iterator[Any]:
    """Yield the values of the settings of these names, as far as they have one."""
    unset = (None, "none", BY_MODEL)
    yield from (each.value for each in emulation.settings if each.name in names and each.value not in unset)


Graph = tuple[Role, Entry]


def with_sizes(derived: DerivedSpec, emulation: Emulation, plan: Callable[[Spec], Plan]) -> DerivedSpec:
    """Return the spec with sizes whose ``plan`` comes closest to the engine's graphs, and what differs still."""
    theirs = graphs_of(emulation)
    best: tuple[int, Spec, frozenset[Graph]] | None = None
    reasons: list[str] = []
    for spec in _candidates(derived.spec, emulation):
        try:
            ours = frozenset((role.role, entry) for role in plan(spec).roles for entry in role.entries)
        except CapturePlannerError as error:
            reasons.append(str(error))
            continue
        missing = len(ours ^ theirs)
        # Of equal ones the first, which is the shortest spec.
        if best is None or missing < best[0]:
            best = (missing, spec, ours)
        if not missing:
            break
    if best is None:
        says = f"no plan can be made of it: {reasons[-1]}"
        return attrs.evolve(derived, assumptions=(*derived.assumptions, says))
    _, spec, ours = best
    return attrs.evolve(derived, spec=spec, assumptions=(*derived.assumptions, *_differs(theirs, ours, emulation)))


def graphs_of(emulation: Emulation) -> frozenset[Graph]:
    """Return each graph of an engine once, as a plan has it."""
    return frozenset((graph.role, graph.entry) for graph in emulation.graphs)


def _differs(theirs: frozenset[Graph], ours: frozenset[Graph], emulation: Emulation) -> Iterator[str]:
    for graphs, where in ((theirs - ours, "its plan leaves out"), (ours - theirs, "its plan adds")):
        if graphs:
            role, entry = max(graphs, key=lambda graph: (graph[1].num_tokens, graph[0].value))
            count = counted(len(graphs), "graph")
            yield f"{where} {count} of {emulation.engine}'s {len(theirs)}, such as {role} {entry}"


def _candidates(spec: Spec, emulation: Emulation) -> Iterator[Spec]:
    """Yield specs whose plans may have the engine's graphs, the shortest first."""
    name = emulation.engine.replace("-", "_")
    explicit = {manager.role: explicit_sizes(manager.graphs) for manager in emulation.managers}
    if name in {policy.value for policy in Policy}:
        policy = Policy(name)
        yield replace(spec, sizes=Sizes(policy=policy))
        # A list that the flags give is part of the engine's policy.
        if policy is Policy.VLLM and emulation.sizes:
            yield replace(spec, sizes=Sizes(policy=policy, num_tokens=emulation.sizes))
        # Flags may end the engine's own list elsewhere.
        largest = explicit[Role.TARGET] or Sizes()
        tokens, reqs = (max(sizes, default=None) for sizes in (largest.num_tokens or (), largest.num_reqs or ()))
        yield replace(spec, sizes=Sizes(policy=policy, max_tokens=tokens, max_reqs=reqs))
    if any(explicit.values()):
        roles = {role.value: replace(spec.roles.of(role), sizes=explicit.get(role)) for role in Role}
        yield replace(spec, roles=Roles(**roles))
    yield spec


def explicit_sizes(graphs: Iterable[CapturedGraph]) -> Sizes | None:
    """Return the sizes of graphs of one role: tokens of those for any batch, requests of those for decodes."""
    entries = [graph.entry for graph in graphs]
    tokens = tuple(sorted({entry.num_tokens for entry in entries if entry.query_len is None}))
    reqs = tuple(sorted({entry.num_reqs for entry in entries if entry.query_len is not None and entry.num_reqs}))
    return Sizes(policy=Policy.EXPLICIT, num_tokens=tokens or None, num_reqs=reqs or None) if entries else None
