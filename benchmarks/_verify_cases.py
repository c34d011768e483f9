"""The runs of ``verify_gpu.py``: healthy ones and planted errors, for one backend in one process."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
from _deployments import CASES, REGISTRY, Case, environment, qwen, small
from _qwen3 import write_config

from capture_planner.modes import Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import replace
from capture_planner.records.fingerprint import Fingerprint
from capture_planner.records.model import DataType
from capture_planner.records.spec import Spec
from capture_planner.runtime import launch as launching
from capture_planner.runtime.choices import Choices
from capture_planner.runtime.models.huggingface import HuggingFaceModel, load_target
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.workload import generated

Spoil = Callable[[int, torch.Tensor, Any], None]


@attrs.frozen(kw_only=True)
class Run:
    """One run: what is served, and what is wrong with it."""

    name: str
    dtype: DataType = DataType.BFLOAT16
    drafts: int = 0
    spoil: Callable[[int], Spoil] | None = None
    """Of a number of layers: what is done to the output of attention."""
    projection: str = ""
    """The linear layer whose output is 1 % too large."""
    place: float = 0.0
    """The layer of the error, as a share of all."""
    fp8: bool = False
    """Whether the weights of linear layers are FP8."""

    @property
    def is_healthy(self) -> bool:
        return self.spoil is None and not self.projection


def scaled(factor: float, place: float, *, in_graphs: bool = False) -> Callable[[int], Spoil]:
    """Return an error: the output of attention is too large in one layer, or in its FULL graphs alone."""

    def of(layers: int) -> Spoil:
        def spoil(layer: int, out: torch.Tensor, metadata: Any) -> None:
            if layer == int(place * (layers - 1)) and (metadata.is_full or not in_graphs):
                out.mul_(factor)

        return spoil

    return of


def infinite(layers: int) -> Spoil:
    """Return an error: the first row of FULL graphs is NaN in the middle layer."""

    def spoil(layer: int, out: torch.Tensor, metadata: Any) -> None:
        if layer == layers // 2 and metadata.is_full:
            out[:1].fill_(torch.nan)

    return spoil


def stale(layers: int) -> Spoil:
    """Return an error: in the middle layer, the first row of FULL graphs is that of the forward before."""
    kept: list[torch.Tensor] = []

    def spoil(layer: int, out: torch.Tensor, metadata: Any) -> None:
        if layer == layers // 2 and metadata.is_full:
            if not kept:
                kept.append(torch.zeros_like(out[0]))
            now = out[0].clone()
            out[0].copy_(kept[0])
            kept[0].copy_(now)

    return spoil


RUNS = (
    Run(name="healthy bf16"),
    Run(name="1 % in the middle layer", spoil=scaled(1.01, 0.5)),
    Run(name="healthy bf16, EAGLE-3", drafts=3),
    Run(name="NaN in graphs", spoil=infinite),
    Run(name="healthy fp16", dtype=DataType.FLOAT16),
    Run(name="healthy fp16, EAGLE-3", dtype=DataType.FLOAT16, drafts=3),
    Run(name="healthy FP8 weights", fp8=True),
    Run(name="1 % in the middle layer, FP8 weights", spoil=scaled(1.01, 0.5), fp8=True),
    Run(name="1 % in graphs of the first layer", spoil=scaled(1.01, 0.0, in_graphs=True)),
    Run(name="-1 % in the last layer", spoil=scaled(0.99, 1.0)),
    Run(name="stale row in graphs", spoil=stale),
    Run(name="1 % in an MLP", projection="mlp.down_proj", place=0.4),
    Run(name="1 % in the middle layer, EAGLE-3", spoil=scaled(1.01, 0.5), drafts=3),
    Run(name="1 % in an output projection, fp16", projection="self_attn.o_proj", place=0.7, dtype=DataType.FLOAT16),
)
"""The first ones first where time is short: what is healthy must pass, in both dtypes."""

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""What a config.json says of FP8 weights with a scale for each block."""
LAYERS = 12
"""Of the model on a GPU: enough for errors in the middle, and less than half of the time of all 28."""


def spec_of(case: Case, run: Run, device: torch.device) -> Spec:
    """Return what a run serves: on a GPU Qwen3-0.6B's shape with fewer layers."""
    if device.type != "cuda":
        spec = small(case, run.drafts)
        return replace(spec, model=replace(spec.model, dtype=run.dtype))
    spec = qwen(case, run.drafts)
    return replace(spec, model=replace(spec.model, dtype=run.dtype, num_layers=LAYERS))


class SpoiledBackend:
    """A backend whose attention of the target is spoiled."""

    def __init__(self, inner: Any, spoil: Spoil) -> None:
        # Attributes rather than __getattr__, which isinstance with a protocol does not see since Python 3.12.
        self.name, self.support, self.padding = inner.name, inner.support, inner.padding
        self.refresh, self.workspace = inner.refresh, inner.workspace
        self.packs_cache = getattr(inner, "packs_cache", False)
        self._inner, self._spoil = inner, spoil

    def reserve(self, reservation: Any) -> Any:
        """Wrap the executor's attention."""
        executor = self._inner.reserve(reservation)
        return SpoiledExecutor(executor, self._spoil) if reservation.role is Role.TARGET else executor


def spoiled_registry(name: str, spoil: Spoil) -> Registry:
    """Return a registry of one backend, spoiled."""
    inner = REGISTRY[name]
    spoiled: Any = SpoiledBackend(inner.backend, spoil)
    return Registry([RegisteredBackend(backend=spoiled, distribution=inner.distribution, version=inner.version)])


class SpoiledExecutor:
    """An executor that changes what attention wrote."""

    def __init__(self, inner: Any, spoil: Spoil) -> None:
        self._inner, self._spoil = inner, spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Any, metadata: Any) -> None:
        """Attend, and spoil."""
        self._inner.attend(layer, query, out, scoring, metadata)
        self._spoil(layer, out, metadata)


@functools.cache
def _model(name: str, dtype: DataType, device: torch.device, fp8: bool) -> HuggingFaceModel:
    """Return the model with random weights, once for all runs of this process."""
    shape = spec_of(CASES[name], Run(name="", dtype=dtype), device).model
    if device.type != "cuda" and not fp8:
        return load_target(None, shape, device=device, dtype=getattr(torch, dtype.value))
    with tempfile.TemporaryDirectory() as folder:
        write_config(shape, Path(folder))
        if fp8:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"quantization_config": FP8}), "utf-8")
        return load_target(Path(folder), shape, device=device, dtype=getattr(torch, dtype.value))


@contextmanager
def _scaled_projection(model: HuggingFaceModel, run: Run) -> Iterator[None]:
    layer = model._layers[int(run.place * (model.num_layers - 1))]
    hook = layer.get_submodule(run.projection).register_forward_hook(lambda module, args, output: output * 1.01)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _quiet(task: str, total: int) -> Iterator[Callable[[str], None]]:
    yield lambda name: None


def execute(name: str, run: Run, device: torch.device) -> dict[str, Any]:
    """Serve and verify one run; return what the verification says."""
    began = time.perf_counter()
    case = CASES[name]
    spec = spec_of(case, run, device)
    registry = REGISTRY if run.spoil is None else spoiled_registry(case.backend, run.spoil(spec.model.num_layers))
    plan = make_plan(spec, environment(case, device), registry)
    model = _model(name, run.dtype, device, run.fp8)
    lengths = ((16, 120), (16, 48)) if device.type == "cuda" else ((2, 40), (8, 40))
    if run.projection:
        # From before the runner compiles the layers until it has served: the reference has none of it.
        init, leave = Runner.__init__, Runner.__exit__
        planted = _scaled_projection(model, run)
        patch: Any = mock.patch.multiple(
            Runner,
            __init__=lambda runner, *given, **named: (planted.__enter__(), init(runner, *given, **named))[1],
            __exit__=lambda runner, *error: (planted.__exit__(None, None, None), leave(runner, *error))[1],
        )
    else:
        patch = nullcontext()
    with mock.patch.object(launching, "model_of", return_value=model), patch:
        outcome = launching.launch(
            plan,
            registry,
            lambda vocabulary: generated(
                12, seed=1, rate=400, prompt_tokens=lengths[0], output_tokens=lengths[1], vocab_size=vocabulary
            ),
            Choices(page_size=64 if device.type == "cuda" else 16, verify=True, any_environment=True),
            _quiet,
        )
    report = outcome.report
    check = report.verification
    assert check is not None, "there were tokens to verify"
    worst = max(check.scales, key=lambda scale: abs(scale.error) / scale.bound, default=None)
    return {
        "run": run.name,
        "backend": name,
        "right": check.passed is run.is_healthy,
        "passed": check.passed,
        "healthy": run.is_healthy,
        "seconds": round(time.perf_counter() - began, 1),
        "serving": round(report.capture_seconds + report.serve_seconds, 1),
        "graphs": len(report.captured),
        "forwards from graphs": sum(forward.entry is not None for forward in report.forwards),
        "resolution": check.resolution,
        "says": check.says.splitlines(),
        "nearest scale": None if worst is None else [str(worst), abs(worst.error) / worst.bound],
        "token, row and mean of their bounds": [
            ratio(check.tokens.worst, check.tokens.bound),
            ratio(check.rows.worst, check.rows.bound),
            ratio(check.rows.mean, check.mean_bound),
        ],
        "fingerprints": {
            f"{graph.role.value} {graph.entry}": described(graph.fingerprint) for graph in report.captured
        },
    }


def ratio(value: float | None, bound: float | None) -> float | None:
    """Return how much of a bound a value takes."""
    return None if value is None or not bound else round(value / bound, 3)


def described(fingerprint: Fingerprint | None) -> Any:
    """Return a fingerprint as JSON has it; None where it could not be read."""
    return None if fingerprint is None else attrs.asdict(fingerprint)
