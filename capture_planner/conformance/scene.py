"""Scenes and steps as data.

A scene with steps is a *case*: it does the same thing anywhere, any number of times. ``dumps`` and
``loads`` convert it to and from one line of JSON, which a reproduction command carries.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from capture_planner.codec.reading import structure
from capture_planner.codec.writing import to_data
from capture_planner.conformance.capture_attack import CaptureAttack
from capture_planner.conformance.draft_scheme import DraftScheme
from capture_planner.errors import CapturePlannerError, InvalidValue, RunError
from capture_planner.modes import Chain, GraphMode, Pool, Role
from capture_planner.records._base import Count, Interval, NonNegative, record, replace
from capture_planner.records.capture import CapturePolicy, CaptureTiming
from capture_planner.records.model import DataType, Model, Recurrent, Speculative
from capture_planner.records.spec import (
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


@record
class Scene:
    """One deployment of a backend, small enough to be captured in a blink."""

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
    loras: NonNegative = 0
    """Most active adapters; 0: no LoRA."""
    ranks: Count = 1
    """Ranks of sequence parallelism: padded tokens are a multiple of it. Heads are those of one rank."""
    beyond: NonNegative = 0
    """By how many requests (or tokens) the largest entries exceed the limits, as in a plan edited by hand."""
    recurrent: bool = False
    """Whether a layer of the target has a state per request, and no KV cache."""
    lazy: bool = False
    """Whether most graphs are captured on their first use, between two steps."""
    compiled: bool = False
    """Whether models are compiled. On a CPU what was traced is called."""
    coupled: bool = False
    """Whether the rows of a batch depend on each other, at the end of each model."""
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

    def spec(self, backend: str) -> Spec:
        shape = self.shape
        layers = self.layers + shape.windowed
        groups: tuple[GroupSpec, ...] = ()
        if shape.windowed:
            groups = (
                GroupSpec(name="full", layers=layers - layers // 2),
                GroupSpec(name="sliding", layers=layers // 2, window=self.window or shape.window),
            )
        recurrent = None
        if self.recurrent:
            # States are of float32 at least.
            width = shape.heads * shape.head_dim
            recurrent = Recurrent(layers=1, state=width * (8 if shape.dtype == "float64" else 4))
        return Spec(
            model=Model(
                name="probe",
                num_layers=layers + self.recurrent,
                num_heads=shape.heads * self.ranks,
                num_kv_heads=shape.kv_heads * self.ranks,
                head_dim=shape.head_dim,
                hidden_size=(layers + self.recurrent) * shape.heads * shape.head_dim,
                vocab_size=VOCABULARY,
                max_model_len=shape.longest,
                dtype=DataType(shape.dtype),
                kv_dtype=DataType.FP8 if self.fp8 else None,
                recurrent=recurrent,
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


def loads(text: str) -> Case:
    """Read what ``dumps`` wrote; raises ``RunError`` that says what is wrong, and where."""
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys)
        if not isinstance(data, dict) or set(data) != {"scene", "steps"} or not isinstance(data["steps"], list):
            raise ValueError("expected an object with scene and a list of steps")
        scene = _structure("scene", data["scene"], Scene)
        steps = tuple(_read_step(f"steps[{number}]", step) for number, step in enumerate(data["steps"]))
        # A scene that no spec can have is refused here, rather than by the planner.
        scene.spec("any")
        return Case(scene=scene, steps=steps)
    except (ValueError, RecursionError, CapturePlannerError) as error:
        reason = " ".join(str(error).split())
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
