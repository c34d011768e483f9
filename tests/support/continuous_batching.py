"""transformers' continuous batching on a CPU: a tiny model with random weights, and a stand-in for CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.generation.continuous_batching import model_runner  # noqa: E402

from capture_planner.codec.shipped import find_environment  # noqa: E402
from capture_planner.modes import GraphMode  # noqa: E402
from capture_planner.planning.planner import plan as make_plan  # noqa: E402
from capture_planner.plugins import registry  # noqa: E402
from capture_planner.records.model import Model  # noqa: E402
from capture_planner.records.plan import Plan  # noqa: E402
from capture_planner.records.spec import Budget, Limits, Policy, Sizes, Spec  # noqa: E402
from capture_planner_transformers import seam  # noqa: E402

PAGES, PAGE_SIZE = 32, 16
MODEL = Model(name="tiny", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=128, max_model_len=64)


@functools.cache
def tiny_model() -> Any:
    """Return a decoder of two layers in float32, the same at each call."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    factory: Any = transformers.AutoModelForCausalLM
    return factory.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


def planned(
    mode: GraphMode = GraphMode.FULL, sizes: Sequence[int] = (1, 2, 4, 8, 16, 32), budget: Budget | None = None
) -> Plan:
    """Return a plan of the tiny model for 8 requests and 64 tokens a step."""
    decodes = tuple(size for size in sizes if size <= 8) or None
    spec = Spec(
        model=MODEL,
        limits=Limits(max_num_reqs=8, max_num_tokens=64),
        mode=mode,
        backend="reference",
        sizes=Sizes(
            policy=Policy.EXPLICIT,
            num_tokens=tuple(sizes) if mode is not GraphMode.FULL_DECODE_ONLY else None,
            num_reqs=decodes if mode.is_separate else None,
        ),
        budget=budget or Budget(),
    )
    return make_plan(spec, find_environment("cpu"), registry.load_backends())


def settings(**options: Any) -> Any:
    """Return a configuration of continuous batching with a small KV cache, for each version's name of a page."""
    known = transformers.ContinuousBatchingConfig.__dataclass_fields__
    page = "page_size" if "page_size" in known else "block_size"
    wanted = {page: PAGE_SIZE, "num_blocks": PAGES, "allow_block_sharing": False, "auto_switch_to_flash": False}
    return transformers.ContinuousBatchingConfig(
        **{name: value for name, value in (wanted | options).items() if name in known}
    )


def generation(tokens: int = 6) -> Any:
    """Return greedy decoding of exactly so many tokens."""
    return transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)


def manager_of(model: Any, **options: Any) -> Any:
    """Return a manager that has not started."""
    options = {"max_batch_tokens": 64} | options
    return model.init_continuous_batching(
        generation_config=generation(), continuous_batching_config=settings(**options)
    )


def generated(model: Any, lengths: Sequence[int], tokens: int = 6) -> list[list[int]]:
    """Return the tokens that ``generate_batch`` gives for random prompts of the lengths."""
    torch.manual_seed(1)
    done = model.generate_batch(
        inputs=[torch.randint(0, 128, (length,)).tolist() for length in lengths],
        generation_config=generation(tokens),
        continuous_batching_config=settings(max_batch_tokens=64, max_requests_per_batch=8),
        progress_bar=False,
    )
    return [result.generated_tokens for result in done.values()]


class StandInGraph:
    """A captured forward pass: replays the same call on the same static tensors, whatever they hold by then."""

    def __init__(self, forward: Callable[[], None]) -> None:
        self.replay = forward

    def reset(self) -> None:
        """Nothing is held on a device."""


def graphs_of_closures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Let a CPU capture closures for graphs; the sizes of each capture are in the list that is returned."""
    captures: list[tuple[int, int]] = []

    def capture(self: Any, forward_fn: Callable[..., None], compute_stream: object, *args: Any) -> None:
        forward_fn(*args)
        io = self.inputs_and_outputs
        captures.append((io.num_q_tokens, io.max_kv_read))
        io.set_graph(StandInGraph(lambda: forward_fn(*args)))

    monkeypatch.setattr(seam, "has_graphs", lambda device: True)
    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", capture)
    for name in ("get_memory_pools", "get_cuda_pools"):
        if hasattr(model_runner, name):
            monkeypatch.setattr(model_runner, name, lambda: (None, None))
    return captures
