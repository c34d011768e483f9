"""A tiny target, plain attention, and a mode that refuses what no graph can hold.

Makes ``model_families`` and ``published_heads`` importable under importlib import mode.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from capture_planner.records.model import Model
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.numerics.dense import recurred

CPU = torch.device("cpu")


def dense(windows=None):
    """Return causal attention of one request, over nothing but the tokens it is given.

    Weights are computed in float32, as the eager attention of transformers does.
    """

    def attend(layer, query, key, value, scoring):
        groups, tokens = query.shape[1] // key.shape[1], len(query)
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * scoring.scale
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        age = torch.arange(tokens)[:, None] - torch.arange(tokens)
        window = tokens if windows is None or windows[layer] is None else windows[layer]
        scores = scores.masked_fill((age < 0) | (age >= window), -torch.inf)
        if scoring.sinks is not None:
            scores = torch.cat([scores, scoring.sinks[:, None, None].expand(-1, tokens, 1)], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)[..., :tokens]
        return torch.einsum("hqk,khd->qhd", weights, value)

    attend.recur = lambda number, inputs, decays: recurred(inputs[None], decays[None])[0]
    return attend


class NoHostReads(TorchDispatchMode):
    """Fails where the host must know a value to go on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run ``func``, unless its result or its shape depends on values."""
        assert torch.Tag.data_dependent_output not in func.tags, func
        if torch.Tag.dynamic_output_shape in func.tags:
            # The tag is for masks; indexing by numbers has a shape of its own.
            assert func is torch.ops.aten.index.Tensor, func
            assert all(index is None or index.dtype == torch.int64 for index in args[1])
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module", autouse=True)
def _computes(one_thread):
    """All of these compute."""


@pytest.fixture(scope="session")
def attention():
    """Make causal attention of one request."""
    return dense


@pytest.fixture(scope="session")
def no_host_reads():
    """Make the mode."""
    return NoHostReads


@pytest.fixture(scope="session")
def tiny():
    """The numbers of a tiny model."""
    return Model(
        name="tiny",
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_model_len=64,
        hidden_size=24,
        vocab_size=50,
    )


@pytest.fixture(scope="session")
def target(tiny):
    """A tiny Llama in float64."""
    return load_target(None, tiny, device=CPU, dtype=torch.float64, seed=7)
