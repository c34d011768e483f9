"""What the parts of ``ranks_gpu.py`` are measured on: this process among the ranks, models, plans and requests."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from transformers import Qwen3Config

from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records.environment import Environment
from capture_planner.records.model import DataType, DraftModel, Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Parallel, Policy, Sizes, Spec
from capture_planner.runtime.assembly import dtype_of
from capture_planner.runtime.chosen import drafter_of
from capture_planner.runtime.compilation.forwards import Compilation
from capture_planner.runtime.graphs.choice import grapher_for
from capture_planner.runtime.models.huggingface import HuggingFaceModel, load_target
from capture_planner.runtime.options import Options
from capture_planner.runtime.ranks.connection import connected
from capture_planner.runtime.ranks.group import RankGroup
from capture_planner.runtime.ranks.peers import ALONE, Peers
from capture_planner.runtime.ranks.processes import RankProcess
from capture_planner.runtime.ranks.watch import RankVerdict, WaitLimits
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.workload import Request

REGISTRY = registry.load_backends()


@attrs.frozen(kw_only=True)
class Rank:
    """This process among the ranks of a part."""

    peers: Peers
    device: torch.device
    environment: Environment
    arguments: dict[str, Any]
    """Of the part."""
    write: Callable[[dict[str, Any]], None]
    """Writes the results so far; of rank 0 alone they are kept."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def settle(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()


# The models and plans ------------------------------------------------------------------------------


def small(rank: Rank, dtype: DataType) -> Model:
    """Return a model of four layers, whose heads every backend takes."""
    if not rank.is_gpu:
        return _model(2, 32, 4, 2, 8, 64, 256, dtype)
    return _model(4, 1024, 16, 8, 64, 3072, 8192, dtype)


def large(rank: Rank, layers: int) -> Model:
    """Return the shape of Qwen3-8B, or with fewer layers."""
    if not rank.is_gpu:
        return _model(2, 32, 4, 2, 8, 64, 256, DataType.FLOAT32)
    return _model(layers, 4096, 32, 8, 128, 12288, 151936, DataType.BFLOAT16)


_WIDTHS: dict[str, int] = {}


def _model(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocabulary: int, dtype: DataType
) -> Model:
    model = Model(
        name=f"{layers} layers of {hidden}",
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=vocabulary,
        max_model_len=512,
        dtype=dtype,
    )
    _WIDTHS[model.name] = inner
    return model


def load(rank: Rank, model: Model, among: Any) -> HuggingFaceModel:
    """Make a model of random weights, the same for any number of ranks; with several layers of logits apart."""
    config = Qwen3Config(
        vocab_size=model.vocab_size or 0,
        hidden_size=model.hidden_size or 0,
        intermediate_size=_WIDTHS[model.name],
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.max_model_len,
        architectures=["Qwen3ForCausalLM"],
        tie_word_embeddings=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return load_target(Path(folder), model, device=rank.device, dtype=dtype_of(model.dtype), seed=7, among=among)


def plan_of(rank: Rank, model: Model, backend: str, most: int, sizes: Sequence[int], k: int, mode: GraphMode) -> Plan:
    """Return a plan for the ranks that there are."""
    place = rank.peers.place
    spec = Spec(
        model=model,
        limits=Limits(max_num_reqs=most, max_num_tokens=max(2 * most * (1 + k), 4096 if rank.is_gpu else 64)),
        mode=mode,
        backend=backend,
        sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=tuple(sizes), num_tokens=tuple(n * (1 + k) for n in sizes)),
        speculative=Speculative(method=Method.EAGLE3, num_tokens=k, model=DraftModel()) if k else None,
        parallel=Parallel(tensor=place.tensor_size, data=place.data_size),
    )
    return make_plan(spec, rank.environment, REGISTRY)


def runner_of(
    rank: Rank,
    plan: Plan,
    model: HuggingFaceModel,
    *,
    peers: Peers | None = None,
    compilation: Compilation | None = None,
    **options: Any,
) -> Runner:
    """Put a plan together with its model; pages for all requests at full length."""
    size = 64 if rank.is_gpu else 16
    pages = PageFormat(page_size=size, num_pages=1 + plan.limits.max_num_reqs * -(-plan.model.max_model_len // size))
    drafter = drafter_of(plan, model, "random", seed=7)
    return Runner(
        plan,
        model,
        drafter,
        REGISTRY,
        grapher_for(rank.device),
        pages=pages,
        device=rank.device,
        options=Options(**options),
        peers=rank.peers if peers is None else peers,
        compilation=compilation,
    )


def compilation_facts(compilation: Compilation) -> dict[str, Any]:
    """Return what was compiled, and what was not, for the results."""
    seconds = round(compilation.seconds, 1)
    return {"kinds": compilation.kinds, "seconds": seconds, "not compiled": compilation.not_compiled}


def requests_of(count: int, vocabulary: int, output: int, seed: int = 0, longest: int = 40) -> list[Request]:
    """Return requests of different lengths, the same on every rank."""
    random = np.random.default_rng(seed)
    return [
        Request(
            name=f"r{index}",
            arrival=0.02 * index,
            prompt=tuple(random.integers(vocabulary, size=int(random.integers(4, longest))).tolist()),
            max_new_tokens=output,
        )
        for index in range(count)
    ]


@contextmanager
def connected_ranks(arguments: dict[str, Any]) -> Iterator[tuple[Peers, torch.device]]:
    """Connect to the other ranks of the part, if there are any."""
    me = RankProcess.of(os.environ)
    kind = arguments["device"]
    device = torch.device(kind, me.local_rank if me else 0) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if me is None:
        yield ALONE, device
        return

    def end(verdict: RankVerdict, is_raised: bool) -> None:
        sys.stderr.write(f"ended: {verdict.says}\n")
        sys.stderr.flush()
        os._exit(1)

    with connected(me, WaitLimits(start=60.0), end) as connection:
        peers = RankGroup(connection, tensor_size=arguments["tensor"], data_size=arguments["data"], device=device)
        yield peers, device
        peers.close()
