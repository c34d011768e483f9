"""Runs in half precision with one planted error, and the same without it: what verification must tell apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import attrs
import torch

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.planner import plan
from capture_planner.records.model import DataType, Method, Model, Speculative
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner_reference import Reference
from capture_planner_runner.launch.launch import Outcome, launch
from capture_planner_runner.launch.request import RunRequest
from capture_planner_runner.models.huggingface import HuggingFaceModel
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.workload import generated
from support.launches import HERE, ProgressRecord, registry_of

LAYERS = 4


@attrs.frozen(kw_only=True)
class Deployment:
    """A random model, requests and a plan, all from a seed."""

    seed: int = 0
    dtype: DataType = DataType.BFLOAT16
    mode: GraphMode = GraphMode.FULL_AND_PIECEWISE
    drafts: int = 0
    hidden_size: int = 64
    requests: int = 8
    layers: int = LAYERS

    @property
    def spec(self) -> Spec:
        """Sizes that pad tokens and requests."""
        heads = self.hidden_size // 16
        speculative = Speculative(method=Method.EAGLE3, num_tokens=self.drafts) if self.drafts else None
        return Spec(
            model=Model(
                name="planted",
                num_layers=self.layers,
                num_heads=heads,
                num_kv_heads=max(heads // 2, 1),
                head_dim=16,
                max_model_len=96,
                hidden_size=self.hidden_size,
                vocab_size=96,
                dtype=self.dtype,
            ),
            limits=Limits(max_num_reqs=5, max_num_tokens=40),
            mode=self.mode,
            backend="reference",
            sizes=Sizes(policy=Policy.EXPLICIT, num_tokens=(12, 40), num_reqs=(2, 5)),
            speculative=speculative,
        )

    @staticmethod
    def nothing() -> AbstractContextManager[None]:
        """Plant nothing."""
        return nullcontext()

    def launch(self, backend: Reference | None = None, plant: Any = nullcontext(), **choices: Any) -> Outcome:  # noqa: B008
        """Serve and verify; ``plant`` is entered while the runner is."""
        registry = registry_of(backend or Reference())
        made = plan(self.spec, HERE, registry)

        def workload(vocab_size: int) -> Any:
            return generated(
                self.requests,
                seed=self.seed,
                rate=300,
                prompt_tokens=(2, 40),
                output_tokens=(8, 40),
                vocab_size=vocab_size,
            )

        enter, leave = Runner.__enter__, Runner.__exit__

        planted = []

        def entered(runner: Runner) -> Runner:
            planted.append(plant(runner.model) if callable(plant) else plant)
            planted[-1].__enter__()
            return enter(runner)

        def left(runner: Runner, *error: object) -> None:
            planted.pop().__exit__(None, None, None)
            leave(runner, *error)

        with mock.patch.multiple(Runner, __enter__=entered, __exit__=left):
            return launch(
                made,
                registry,
                workload,
                RunRequest(page_size=4, seed=self.seed, verify=True, **choices),
                ProgressRecord(),
            )


class SpoiledReference(Reference):
    """The reference backend; ``spoil(layer, query, out, metadata, attend)`` replaces the target's attention."""

    def __init__(self, spoil: Callable[..., None]) -> None:
        self.spoil = spoil

    def reserve(self, reservation: Any) -> Any:
        """Wrap the executor's attention."""
        executor = super().reserve(reservation)
        attend = executor.attend

        def spoiled(layer: int, query: Any, out: Any, scoring: Any, metadata: Any) -> None:
            if reservation.role is not Role.TARGET:
                attend(layer, query, out, scoring, metadata)
                return
            self.spoil(
                layer, out, metadata, lambda given=metadata, into=out: attend(layer, query, into, scoring, given)
            )

        executor.attend = spoiled  # type: ignore[method-assign]
        return executor


def scaled_attention(layer: int, factor: float = 1.01, *, in_graphs: bool = False) -> Reference:
    """The output of attention is too large in one layer, everywhere or in FULL graphs alone."""

    def spoil(at: int, out: Any, metadata: Any, attend: Any) -> None:
        attend()
        if at == layer and (metadata.is_full or not in_graphs):
            out.mul_(factor)

    return SpoiledReference(spoil)


def wrong_page(layer: int) -> Reference:
    """In one layer the first request's second page is its first one."""

    def spoil(at: int, out: Any, metadata: Any, attend: Any) -> None:
        table = metadata.fields["block_table"]
        if at != layer or table.shape[1] < 2:
            attend()
            return
        wrong = table.clone()
        wrong[0, 1] = table[0, 0]
        attend(attrs.evolve(metadata, fields={**metadata.fields, "block_table": wrong}))

    return SpoiledReference(spoil)


def stale_row(layer: int) -> Reference:
    """In one layer the first row of a FULL graph is what the forward before left there."""
    kept: dict[int, Any] = {}

    def spoil(at: int, out: Any, metadata: Any, attend: Any) -> None:
        attend()
        if at == layer and metadata.is_full:
            row = kept.setdefault(0, torch.zeros_like(out[0]))
            now = out[0].clone()
            out[0].copy_(row)
            row.copy_(now)

    return SpoiledReference(spoil)


def projection(layer: int, name: str = "self_attn.o_proj", factor: float = 1.01) -> Callable[[Any], Any]:
    """The output of one linear layer is too large while the runner serves, in graphs and eager."""

    @contextmanager
    def planted(model: HuggingFaceModel) -> Iterator[None]:
        module = model._layers[layer].get_submodule(name)
        hook = module.register_forward_hook(lambda module, args, output: output * factor)
        try:
            yield
        finally:
            hook.remove()

    return planted
