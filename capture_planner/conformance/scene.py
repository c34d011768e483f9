"""What is set up and what is done to it, as data: a scene and its steps, which can be written down.

A scene with steps is a *case*: it does the same thing anywhere, any number of times. ``dumps`` and
``loads`` are its text, of one line, which a reproduction command carries.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any, get_args, get_origin, get_type_hints

import attrs

from capture_planner.errors import CapturePlannerError, RunError
from capture_planner.modes import Chain, GraphMode, Pool
from capture_planner.records.model import DataType, DraftModel, Method, Model, Speculative
from capture_planner.records.spec import GroupSpec, Limits, Policy, Roles, RoleSpec, Sizes, Spec

VOCABULARY = 53


@attrs.frozen(kw_only=True)
class Shape:
    """What kernels are compiled for; a backend runs some of these and refuses others."""

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    longest: int
    """The model's longest sequence, in tokens."""
    windowed: bool = False
    """Whether half of the layers have a sliding window."""

    @property
    def window(self) -> int | None:
        """Its width in tokens: a little more than a page, so that it ends inside one."""
        return self.page_size + 1 if self.windowed else None

    def __str__(self) -> str:
        window = f", window {self.window}" if self.windowed else ""
        return (
            f"{self.dtype}, {self.heads}/{self.kv_heads} heads of {self.head_dim}, pages of "
            f"{self.page_size}, {self.longest} tokens{window}"
        )


@attrs.frozen(kw_only=True)
class Scene:
    """One deployment of a backend, small enough to be captured in a blink."""

    shape: Shape
    mode: GraphMode = GraphMode.FULL_AND_PIECEWISE
    num_reqs: int = 3
    num_tokens: int = 16
    layers: int = 1
    size_tokens: tuple[int, ...] = (16,)
    """Captured sizes of mixed batches, in tokens; empty: as the default policy has them."""
    size_reqs: tuple[int, ...] = (3,)
    """Captured sizes of uniform decodes, in requests."""
    drafts: int = 0
    """K; 0: no drafter."""
    schedule: tuple[tuple[int, int, int], ...] = ()
    eagle3: bool = False
    fused: bool = True
    """Whether draft chains are planned as one graph."""
    per_role: bool = False
    """Whether each role has a pool of its own."""
    ahead: bool = False
    """Whether steps are launched ahead, and drafts are verified on the device."""
    seed: int = 0
    """Of weights, tokens and garbage."""

    def spec(self, backend: str) -> Spec:
        """Return the spec that is planned."""
        shape = self.shape
        layers = self.layers + shape.windowed
        groups: tuple[GroupSpec, ...] = ()
        if shape.windowed:
            groups = (
                GroupSpec(name="full", layers=layers - layers // 2),
                GroupSpec(name="sliding", layers=layers // 2, window=shape.window),
            )
        speculative = None
        if self.drafts:
            speculative = Speculative(
                method=Method.EAGLE3 if self.eagle3 else Method.EAGLE,
                num_tokens=self.drafts,
                schedule=self.schedule,
                model=DraftModel(),
                chain=Chain.FUSED if self.fused else Chain.SINGLE,
            )
        return Spec(
            model=Model(
                name="probe",
                num_layers=layers,
                num_heads=shape.heads,
                num_kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                hidden_size=layers * shape.heads * shape.head_dim,
                vocab_size=VOCABULARY,
                max_model_len=shape.longest,
                dtype=DataType(shape.dtype),
            ),
            limits=Limits(max_num_reqs=self.num_reqs, max_num_tokens=self.num_tokens),
            mode=self.mode,
            backend=backend,
            speculative=speculative,
            sizes=Sizes(policy=Policy.EXPLICIT, num_tokens=self.size_tokens, num_reqs=self.size_reqs)
            if self.size_tokens
            else Sizes(),
            roles=Roles(target=RoleSpec(groups=groups)),
            pool=Pool.PER_ROLE if self.per_role else Pool.SHARED,
        )


# What happens in a scene. Requests are named by the number of their arrival, from 0.


@attrs.frozen(kw_only=True)
class Arrive:
    """A request comes, some of it computed already, as if by steps before."""

    prompt: int
    computed: int = 0
    """Tokens whose keys and values are in the cache; the prompt is behind it from ``prompt`` on."""
    shares: int | None = None
    """Whose full pages of the computed part it shares, as far as it has them; None: nobody's."""


@attrs.frozen(kw_only=True)
class Depart:
    """A request leaves, and its pages are free: others get them soon."""

    request: int


@attrs.frozen(kw_only=True)
class Move:
    """A request's own pages are exchanged for others, and what is in them is taken along."""

    request: int


@attrs.frozen(kw_only=True)
class Reload:
    """Weights are loaded anew, in place, and what lives is computed again."""

    seed: int


@attrs.frozen(kw_only=True)
class Forward:
    """One step: the target on these rows, and the drafter after it where there is one."""

    rows: tuple[tuple[int, int, int], ...]
    """For each row its request, its tokens, and how many of its drafts are kept. A row may have none."""


@attrs.frozen(kw_only=True)
class Serve:
    """Requests are served to their end by the scheduler, beside what lives: each has a prompt length,
    a number of new tokens, and the step of its arrival.
    """

    requests: tuple[tuple[int, int, int], ...]


Step = Arrive | Depart | Move | Reload | Forward | Serve
_STEPS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind for kind in (Arrive, Depart, Move, Reload, Forward, Serve)
}


@attrs.frozen(kw_only=True)
class Case:
    """A scene and what happened in it."""

    scene: Scene
    steps: tuple[Step, ...] = ()


def dumps(case: Case) -> str:
    """Write a case as one line of JSON; what is as its default is left out."""
    steps = [{"do": type(step).__name__.lower()} | _changed(step) for step in case.steps]
    return json.dumps({"scene": _changed(case.scene), "steps": steps}, separators=(",", ":"))


def loads(text: str) -> Case:
    """Read what ``dumps`` wrote; raises ``RunError`` that says what is wrong with it, and where."""
    try:
        found = json.loads(text, object_pairs_hook=_once)
        _known("the case", found, ("scene", "steps"))
        scene = _read_scene(found["scene"])
        if not isinstance(found["steps"], list):
            raise ValueError("steps: expected a list")
        steps = tuple(_read_step(f"steps[{at}]", step) for at, step in enumerate(found["steps"]))
        return Case(scene=scene, steps=steps)
    except (ValueError, RecursionError, CapturePlannerError) as error:
        raise RunError(
            f"this is not a case of the conformance suite: {' '.join(str(error).split())}; "
            "give one as it was printed"
        ) from error


def _read_scene(data: Any) -> Scene:
    given = dict(data) if isinstance(data, dict) else data
    if isinstance(given, dict) and "shape" in given:
        given["shape"] = _record("scene.shape", Shape, given["shape"])
    modes = [mode.value for mode in GraphMode]
    if isinstance(given, dict) and "mode" in given:
        if given["mode"] not in modes:
            raise ValueError(f"scene.mode: expected one of {', '.join(modes)}, got {given['mode']!r}")
        given["mode"] = GraphMode(given["mode"])
    scene: Scene = _record("scene", Scene, given)
    for where, part, names in (
        ("scene", scene, ("num_reqs", "num_tokens", "layers")),
        ("scene.shape", scene.shape, ("heads", "kv_heads", "head_dim", "page_size", "longest")),
    ):
        for name in names:
            if getattr(part, name) < 1:
                raise ValueError(f"{where}.{name}: must be at least 1, and is {getattr(part, name)}")
    scene.spec("any")
    return scene


def _read_step(where: str, data: Any) -> Step:
    if not isinstance(data, dict) or data.get("do") not in _STEPS:
        raise ValueError(
            f"{where}: expected an object whose `do` is one of {', '.join(_STEPS)}, got {data!r}"
        )
    step: Step = _record(where, _STEPS[data["do"]], {name: data[name] for name in data if name != "do"})
    return step


def _record(where: str, kind: type[Any], data: Any) -> Any:
    """Make a record of plain data, each value of its annotated type, and no number below 0."""
    fields = attrs.fields_dict(kind)
    _known(where, data, [n for n, field in fields.items() if field.default is attrs.NOTHING], fields)
    kinds = get_type_hints(kind)
    values = {name: _tuples(value) for name, value in data.items()}
    for name, value in values.items():
        if not _fits(value, kinds[name]):
            raise ValueError(f"{where}.{name}: expected {_in_words(kinds[name])}, got {data[name]!r}")
        if any(number < 0 for number in _numbers(value)):
            raise ValueError(f"{where}.{name}: no number may be below 0, got {data[name]!r}")
    return kind(**values)


def _known(where: str, data: Any, needed: Collection[str], known: Collection[str] = ()) -> None:
    """Refuse what is no object, lacks a key that is needed, or has one that is not known."""
    known = known or needed
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object with {', '.join(known)}, got {data!r}")
    for name in needed:
        if name not in data:
            raise ValueError(f"{where}: {name} is missing")
    for name in data:
        if name not in known:
            raise ValueError(f"{where}: unknown key {name!r}; known are {', '.join(known)}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object whose keys are each given once."""
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(k for i, k in enumerate(keys) if k in keys[:i])!r} is given twice")
    return data


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int):
        yield value


def _tuples(item: Any) -> Any:
    """Make tuples of lists, as they were."""
    return tuple(map(_tuples, item)) if isinstance(item, list) else item


def _in_words(kind: Any) -> str:
    """Write a type as people would."""
    inner = get_args(kind)
    if get_origin(kind) is tuple:
        if inner[-1] is ...:
            return f"a list, each {_in_words(inner[0])}"
        return f"[{', '.join(_in_words(each) for each in inner)}]"
    if inner:
        return " or ".join(_in_words(each) for each in inner)
    words = {int: "a whole number", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))


def _fits(value: Any, kind: Any) -> bool:
    """Say whether a value is of an annotated type; no bool is a number here."""
    inner = get_args(kind)
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            return False
        each = inner[:1] * len(value) if inner[-1] is ... else inner
        return len(value) == len(each) and all(map(_fits, value, each))
    if inner:
        return any(_fits(value, one) for one in inner)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _changed(value: Any) -> dict[str, Any]:
    found = {}
    for field in attrs.fields(type(value)):
        item = getattr(value, field.name)
        if item == field.default and field.default is not attrs.NOTHING:
            continue
        found[field.name] = _changed(item) if attrs.has(type(item)) else getattr(item, "value", item)
    return found
