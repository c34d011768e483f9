"""Scenes and steps as data, and in words.

A scene with steps is a *case*: it does the same thing anywhere, any number of times. ``dumps`` and
``loads`` convert it to and from one line of JSON, which a reproduction command carries.
"""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

import attrs

from capture_planner.codec.reading import structure
from capture_planner.codec.writing import to_data
from capture_planner.errors import CapturePlannerError, InvalidValue, RunError, one_line
from capture_planner.modes import Chain, GraphMode, Pool, Role
from capture_planner.records._base import Count, Interval, NonNegative, record, replace
from capture_planner.records.model import DataType, DraftModel, Method, Model, Speculative, Tier
from capture_planner.records.spec import (
    CapturePolicy,
    CaptureTiming,
    GroupSpec,
    Limits,
    Lora,
    Parallel,
    Policy,
    Requests,
    Roles,
    RoleSpec,
    Sizes,
    Spec,
)
from capture_planner.records.text import counted
from capture_planner_runner.capture.sessions import Work

VOCABULARY = 53

ON_FIRST_USE = CaptureTiming(policy=CapturePolicy.LAZY, memory=1 << 30, seconds_per_minute=1e6)
"""With a budget that is never spent: what is captured depends on no clock."""

Seed = Annotated[int, Interval(0, (1 << 62) - 1)]
Triple = tuple[NonNegative, NonNegative, NonNegative]


@record
class Shape:
    """What kernels are compiled for; a backend runs some shapes and refuses others."""

    dtype: str
    heads: Count
    kv_heads: Count
    head_dim: Count
    page_size: Count
    longest: Count
    """The model's longest sequence, in tokens."""
    windowed: bool = False
    """Whether half of the layers have a sliding window."""

    @property
    def window(self) -> int | None:
        """The width in tokens, unless a scene has another: a little more than a page, so that it ends inside one."""
        return self.page_size + 1 if self.windowed else None

    def __str__(self) -> str:
        window = f", window {self.window}" if self.windowed else ""
        return (
            f"{self.dtype}, {self.heads}/{self.kv_heads} heads of {self.head_dim}, pages of "
            f"{self.page_size}, {self.longest} tokens{window}"
        )


class DraftScheme(enum.Enum):
    """How the drafts of a scene are made; a probe stands for the drafter."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    LAYERS = "layers"
    """EAGLE of two layers."""
    MODULES = "modules"
    """MTP of a module for each draft, all in the draft prefill."""
    DRAFT_MODEL = "draft_model"
    """A whole model; the draft prefill has a row more for each request."""
    PARALLEL = "parallel"
    """EAGLE-3 with all drafts in the draft prefill, on mask tokens."""
    PARALLEL_MODEL = "parallel_model"
    """A draft model with all drafts in the draft prefill, on mask tokens."""

    @property
    def reads_states(self) -> bool:
        """Whether it goes on from the target's hidden states, and its tokens stand one position later."""
        return self not in (DraftScheme.DRAFT_MODEL, DraftScheme.PARALLEL_MODEL)

    @property
    def is_parallel(self) -> bool:
        """Whether mask tokens take the rows of drafts yet to be made."""
        return self in (DraftScheme.PARALLEL, DraftScheme.PARALLEL_MODEL)

    @property
    def reads_aux(self) -> bool:
        """Whether it reads auxiliary states of the target, as EAGLE-3 does."""
        return self in (DraftScheme.EAGLE3, DraftScheme.PARALLEL)

    def __str__(self) -> str:
        return _TEXTS[self]

    def speculative(self, drafts: int, schedule: tuple[Tier, ...], chain: Chain, *, sinks: bool) -> Speculative:
        """Return the speculation of a spec with this drafter, at K of ``drafts``."""
        # A module for each draft, and two at least: one module alone would be a chain.
        layers = {DraftScheme.LAYERS: 2, DraftScheme.MODULES: max(drafts, 2)}.get(self, 1)
        method = Method.EAGLE3 if self.reads_aux else Method.EAGLE
        if self is DraftScheme.MODULES:
            method = Method.MTP
        return Speculative(
            method=method if self.reads_states else Method.DRAFT_MODEL,
            num_tokens=drafts,
            schedule=schedule,
            model=DraftModel(num_layers=layers, sinks=sinks),
            chain=chain,
            parallel_drafting=self.is_parallel,
        )


_TEXTS = {
    DraftScheme.EAGLE: "EAGLE",
    DraftScheme.EAGLE3: "EAGLE-3",
    DraftScheme.LAYERS: "EAGLE of two layers",
    DraftScheme.MODULES: "MTP of several modules",
    DraftScheme.DRAFT_MODEL: "a draft model",
    DraftScheme.PARALLEL: "parallel EAGLE-3",
    DraftScheme.PARALLEL_MODEL: "a parallel draft model",
}


@record
class CaptureAttack:
    """How the capture session of a scene goes."""

    order: NonNegative = 0
    """Seed of the order of captures; 0: the runner's own."""
    alone: NonNegative = 0
    """The number of the only graph of each role that fits into memory, from 1; 0: all do."""
    breaks: NonNegative = 0
    """The number of the attention call, from 1, that raises in a first session; 0: none does."""
    stays_eager: bool = False
    """Whether there is no second session after one that broke off."""

    def arranged(self, work: Work) -> Work:
        """Return what is captured in the order of this attack."""
        # With a generator of its own, so that the order depends on its seed alone.
        return random.Random(self.order).sample(work, len(work)) if self.order else work


@attrs.frozen
class Feature:
    """What a scene can have in addition to plain attention, in the field of that name."""

    name: str
    """Its name in reports."""
    values: tuple[Any, ...]
    """Values to draw from, the likelier ones more often; the first is without the feature."""
    text: Callable[[Any], str] | None = None
    """Describes a value in a case; None: the name does."""
    may_be_refused: bool = False
    """Whether a backend may refuse it; the others are the runner's."""


FEATURES: Mapping[str, Feature] = {
    "softcap": Feature("soft capping", (False, False, True), may_be_refused=True),
    "sinks": Feature("attention sinks", (False, False, True), may_be_refused=True),
    "sharp": Feature("another scale", (False, False, True), may_be_refused=True),
    "fp8": Feature("a KV cache in fp8", (False, False, False, True), may_be_refused=True),
    "distant": Feature("pages far apart", (False, False, False, True), may_be_refused=True),
    "loras": Feature("LoRA", (0, 0, 0, 0, 0, 1, 2), lambda most: f"up to {counted(most, 'active adapter')}"),
    "capped": Feature(
        "a limit on the requests of a graph",
        (0, 0, 0, 0, 0, 1, 2, 3),
        lambda most: f"full graphs of up to {counted(most, 'request')}",
    ),
    "ranks": Feature("sequence parallelism", (1, 1, 1, 1, 2, 4), lambda ranks: f"sequence parallelism of {ranks}"),
    "beyond": Feature(
        "entries beyond the limits", (0, 0, 0, 1, 3), lambda more: f"the largest graphs {more} beyond the limits"
    ),
    "lazy": Feature(
        "captures on first use", (False, False, False, True), lambda lazy: "most graphs captured on first use"
    ),
}

WINDOW, VARYING = "sliding windows", "decodes of varying lengths"
"""Features that follow from the shape, and from the drafter."""


@record
class Scene:
    """One deployment of a backend, small enough to be captured in a blink.

    A subclass can have more ``features``, each with a field.
    """

    features: ClassVar[Mapping[str, Feature]] = FEATURES

    shape: Shape
    mode: GraphMode = GraphMode.FULL_AND_PIECEWISE
    num_reqs: Requests = 3
    num_tokens: Count = 16
    layers: Count = 1
    window: NonNegative = 0
    """The width of sliding windows in tokens, where the shape has them; 0: the shape's."""
    size_tokens: tuple[NonNegative, ...] = (16,)
    """Captured sizes of mixed batches, in tokens; empty: the default policy's."""
    size_reqs: tuple[NonNegative, ...] = (3,)
    """Captured sizes of uniform decodes, in requests."""
    drafts: NonNegative = 0
    """K; 0: no drafter."""
    schedule: tuple[Triple, ...] = ()
    drafter: DraftScheme = DraftScheme.EAGLE
    """How drafts are made, if there are any."""
    agreeing: bool = False
    """Whether target and drafter choose between two tokens, so that they agree on every other draft."""
    varying: bool = False
    """Whether decodes of the target and the draft prefill have graphs for requests of different lengths."""
    fused: bool = True
    """Whether draft chains are planned as one graph."""
    per_role: bool = False
    """Whether each role has a pool of its own."""
    ahead: bool = False
    """Whether steps are launched ahead, and drafts are verified on the device."""
    capture: CaptureAttack = CaptureAttack()
    """How the capture session goes."""
    full_cache: bool = False
    """Whether the longest requests take all pages of the cache before all places are taken."""
    softcap: bool = False
    """Whether scores are capped; layers with a window have another cap."""
    sinks: bool = False
    """Whether heads have sinks."""
    sharp: bool = False
    """Whether the scale is not one over the root of the head dimension."""
    fp8: bool = False
    """Whether keys and values are stored in FP8 E4M3, without scales."""
    distant: bool = False
    """Whether the pages of the cache lie so far apart that offsets do not fit into 32 bits."""
    loras: NonNegative = 0
    """Most active adapters; 0: no LoRA. Requests that are served have one adapter more by turns, or none."""
    capped: NonNegative = 0
    """Most requests of a full graph, as if the backend said so: of the layers with windows alone, where there are some;
    0: its own limit."""
    ranks: Count = 1
    """Ranks of sequence parallelism: padded tokens are a multiple of it. Heads are those of one rank."""
    beyond: NonNegative = 0
    """By how many requests (or tokens) the largest entries exceed the limits, as in a plan edited by hand."""
    lazy: bool = False
    """Whether most graphs are captured on their first use, between two steps."""
    seed: Seed = 0
    """Seed of weights, tokens and garbage."""

    @property
    def speculative(self) -> Speculative | None:
        """What the spec says about drafts."""
        if not self.drafts:
            return None
        chain = Chain.FUSED if self.fused else Chain.SINGLE
        plain = self.drafter.speculative(self.drafts, self.schedule, chain, sinks=self.sinks)
        return replace(plain, varying_decodes=(Role.TARGET, Role.DRAFT_PREFILL)) if self.varying else plain

    @property
    def has_own_rows(self) -> bool:
        """Whether the draft prefill has rows of its own instead of the target's."""
        return self.speculative is not None and self.speculative.has_own_rows

    @property
    def extra_slots(self) -> int:
        """Rows of a request that the draft prefill has more than the target's batch."""
        return 0 if self.speculative is None else self.speculative.extra_slots

    @property
    def decode_width(self) -> int:
        """The most tokens of a request in a decode, the drafter's extra slots included."""
        return 1 + self.drafts + self.extra_slots

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the features that it has."""
        drafted = [str(self.drafter), *([VARYING] if self.varying else [])] if self.drafts else []
        windowed = [WINDOW] if self.shape.windowed else []
        return (*(feature.name for feature, _ in self.chosen()), *drafted, *windowed)

    def chosen(self) -> Iterator[tuple[Feature, Any]]:
        """Yield each of ``features`` that it has, with its value."""
        for name, feature in self.features.items():
            if (value := getattr(self, name)) != feature.values[0]:
                yield feature, value

    def spec(self, backend: str) -> Spec:
        """Return what the planner is asked for."""
        shape = self.shape
        # A shape with windows has a layer of each kind.
        layers = self.layers + shape.windowed
        groups: tuple[GroupSpec, ...] = ()
        if shape.windowed:
            groups = (
                GroupSpec(name="full", layers=layers - layers // 2),
                GroupSpec(name="sliding", layers=layers // 2, window=self.window or shape.window),
            )
        return Spec(
            model=Model(
                name="probe",
                num_layers=layers,
                # The plan divides heads among ranks, and the shape says how many one rank has.
                num_heads=shape.heads * self.ranks,
                num_kv_heads=shape.kv_heads * self.ranks,
                head_dim=shape.head_dim,
                hidden_size=layers * shape.heads * shape.head_dim,  # the outputs of all layers, side by side
                vocab_size=VOCABULARY,
                max_model_len=shape.longest,
                dtype=DataType(shape.dtype),
                kv_dtype=DataType.FP8 if self.fp8 else None,
                sinks=self.sinks,
            ),
            limits=Limits(max_num_reqs=self.num_reqs, max_num_tokens=self.num_tokens),
            mode=self.mode,
            backend=backend,
            speculative=self.speculative,
            sizes=Sizes(policy=Policy.EXPLICIT, num_tokens=self.size_tokens, num_reqs=self.size_reqs)
            if self.size_tokens
            else Sizes(),
            roles=Roles(target=RoleSpec(groups=groups)),
            parallel=Parallel(tensor=self.ranks, sequence=self.ranks > 1),
            lora=Lora(max_active=self.loras, specialize=True) if self.loras else None,
            pool=Pool.PER_ROLE if self.per_role else Pool.SHARED,
            capture=ON_FIRST_USE if self.lazy else CaptureTiming(),
        )


# What happens in a scene. Requests are numbered in the order of their arrival, from 0.


@record
class Arrive:
    """A request arrives, some of it computed already, as if by earlier steps."""

    prompt: NonNegative
    computed: NonNegative = 0
    """Tokens whose keys and values are in the cache; the prompt is done from ``prompt`` on."""
    shares: NonNegative | None = None
    """The request whose full pages of the computed part it shares, if any."""


@record
class Depart:
    """A request leaves; its pages are free, and soon another's."""

    request: NonNegative


@record
class Move:
    """A request's own pages are exchanged for others, with their contents."""

    request: NonNegative


@record
class Reload:
    """Weights are reloaded in place, and live requests are computed again."""

    seed: Seed


@record
class RunBatch:
    """One step: the target on these rows, then the drafter if there is one."""

    rows: tuple[Triple, ...]
    """For each row its request, its tokens, and how many of its drafts are accepted. Tokens may be 0."""
    loras: NonNegative = 0
    """Active adapters, as ``Batch`` counts them."""


@record
class Serve:
    """The scheduler serves requests to their end, next to the live ones.

    Each has a prompt length, a number of new tokens, and the step of its arrival.
    """

    requests: tuple[Triple, ...]
    stop: NonNegative = 0
    """Tokens that end an output: those whose id is a multiple of it; 0: none does."""


Step = Arrive | Depart | Move | Reload | RunBatch | Serve
_STEPS: dict[str, type[Any]] = {
    "arrive": Arrive,
    "depart": Depart,
    "move": Move,
    "reload": Reload,
    "forward": RunBatch,
    "serve": Serve,
}
_STEP_NAMES = {kind: name for name, kind in _STEPS.items()}


def step_name(step: Step) -> str:
    """Return the name of a step's kind, as a case has it under ``do``."""
    return _STEP_NAMES[type(step)]


@record
class Case:
    """A scene and what happens in it."""

    scene: Scene
    steps: tuple[Step, ...] = ()


def dumps(case: Case) -> str:
    """Return a case as one line of JSON, without the values that are defaults."""
    steps = [{"do": step_name(step)} | to_data(step) for step in case.steps]
    return json.dumps({"scene": to_data(case.scene), "steps": steps}, separators=(",", ":"))


def loads(text: str, kind: type[Scene] = Scene) -> Case:
    """Read what ``dumps`` wrote, of a scene of this kind; raises ``RunError`` that says what is wrong, and where."""
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys)
        if not isinstance(data, dict) or set(data) != {"scene", "steps"} or not isinstance(data["steps"], list):
            raise ValueError("expected an object with scene and a list of steps")
        scene = _structure("scene", data["scene"], kind)
        steps = tuple(_read_step(f"steps[{number}]", step) for number, step in enumerate(data["steps"]))
        # A scene that no spec can have is refused here, rather than by the planner.
        scene.spec("any")
        return Case(scene=scene, steps=steps)
    except (ValueError, RecursionError, CapturePlannerError) as error:
        reason = one_line(error)
        raise RunError(f"not a case of the conformance suite: {reason}; copy it as it was printed") from error


def _read_step(where: str, data: Any) -> Any:
    if not isinstance(data, dict) or data.get("do") not in _STEPS:
        raise ValueError(f"{where}: expected an object whose `do` is one of {', '.join(_STEPS)}, got {data!r}")
    fields = {name: value for name, value in data.items() if name != "do"}
    return _structure(where, fields, _STEPS[data["do"]])


def _structure(where: str, data: Any, kind: type[Any]) -> Any:
    try:
        return structure(data, kind)
    except InvalidValue as error:
        raise ValueError("; ".join(str(problem.under((where,))) for problem in error.problems)) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            raise ValueError(f"{key!r} is given twice")
    return dict(pairs)


# In words.


def describe_case(case: Case) -> tuple[str, ...]:
    """Return a line for the set-up and one for each step. Requests are numbered by arrival, from 0."""
    return (_scene(case.scene), *_described(case.steps))


def _scene(scene: Scene) -> str:
    parts = [
        f"set up {scene.shape}",
        counted(scene.layers, "layer"),
        *([f"windows of {scene.window} instead"] if scene.window else []),
        scene.mode.value,
        f"up to {counted(scene.num_reqs, 'request')} and {counted(scene.num_tokens, 'token')}",
    ]
    if scene.size_tokens:
        parts.append(f"captured at {_list(scene.size_tokens)} tokens and {_list(scene.size_reqs)} requests")
    if scene.drafts:
        drafting = f"{scene.drafter} with {counted(scene.drafts, 'draft')}"
        for first, last, k in scene.schedule:
            drafting += f", {k} at {first} to {last} requests"
        parts.append(drafting)
        if scene.speculative is not None and scene.speculative.is_chain:
            parts.append("chains as one graph" if scene.fused else "chains in single steps")
        if scene.agreeing:
            parts.append("every other draft accepted")
        if scene.varying:
            parts.append(VARYING)
    if scene.per_role:
        parts.append("a pool per role")
    if scene.ahead:
        parts.append("steps launched ahead")
    if scene.full_cache:
        parts.append("no page to spare")
    parts += [feature.text(value) if feature.text else feature.name for feature, value in scene.chosen()]
    parts += _attack(scene.capture)
    return f"{'; '.join(parts)}; seed {scene.seed}"


def _attack(attack: CaptureAttack) -> Iterator[str]:
    if attack.order:
        yield f"captured in another order ({attack.order})"
    if attack.alone:
        yield f"memory for graph {attack.alone} of each role alone"
    if attack.breaks:
        after = "everything eager after it" if attack.stays_eager else "captured again after it"
        yield f"an error at attention call {attack.breaks} of the capture, {after}"


def _described(steps: tuple[Step, ...]) -> Iterator[str]:
    arrived = 0
    for step in steps:
        match step:
            case Arrive():
                computed = f", {step.computed} computed before" if step.computed else ""
                shares = "" if step.shares is None else f", sharing full pages of request {step.shares}"
                yield f"request {arrived} arrives: a prompt of {counted(step.prompt, 'token')}{computed}{shares}"
                arrived += 1
            case Depart():
                yield f"request {step.request} leaves and frees its pages"
            case Move():
                yield f"the pages of request {step.request} are exchanged for others"
            case Reload():
                yield f"weights are reloaded in place, from seed {step.seed}"
            case RunBatch():
                loras = f" with {counted(step.loras, 'active adapter')}" if step.loras else ""
                yield f"a step of {counted(len(step.rows), 'request')}{loras}: {'; '.join(map(_row, step.rows))}"
            case Serve():
                served = "; ".join(map(_served, step.requests))
                ends = f"; tokens divisible by {step.stop} end an output" if step.stop else ""
                yield f"{counted(len(step.requests), 'request')} served to the end, next to live ones: {served}{ends}"


def _row(row: tuple[int, int, int]) -> str:
    request, count, accepted = row
    drafts = f", {counted(accepted, 'draft')} accepted" if accepted else ""
    return f"request {request} with {counted(count, 'token')}{drafts}"


def _served(request: tuple[int, int, int]) -> str:
    prompt, output, arrival = request
    later = f", {counted(arrival, 'step')} later" if arrival else ""
    return f"a prompt of {prompt} and {counted(output, 'new token')}{later}"


def _list(numbers: tuple[int, ...]) -> str:
    return " and ".join(map(str, numbers))
