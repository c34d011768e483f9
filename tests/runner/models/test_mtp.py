"""MTP modules: from published files, against a forward written out token by token."""

import pytest
import torch
from torch.testing import assert_close

from capture_planner.errors import RunError
from capture_planner.records.model import Method
from capture_planner_runner.models.drafters import load_drafter
from support.published_heads import HIDDEN, VOCAB, WrittenHead, published_modules, speculative, write

FIRST = 4
"""Layers of the target in these files."""


@pytest.fixture(scope="module", autouse=True)
def generator():
    """Leave the global generator as it was before this file."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


def folder_of(path, count, **options):
    """Write ``count`` modules after their target's layers; return the folder and the tensors of the modules."""
    tensors = published_modules(FIRST, count, **options)
    write(path, tensors, num_hidden_layers=FIRST, num_nextn_predict_layers=count)
    mine = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return {
        f"layers.{int(name.split('.')[1]) - FIRST}.{name.split('.', 2)[2]}": tensor
        for name, tensor in mine.items()
        if name.startswith("layers.") and int(name.split(".")[1]) >= FIRST
    }


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("own", [False, True], ids=["the target's", "own embeddings and heads"])
def test_each_module_computes_what_is_written_out(count, own, tmp_path, target, attention):
    """Out of the folder of a whole model, whose other tensors are not read."""
    tensors = folder_of(tmp_path, count, own_heads=own, embeddings=own)
    drafter = load_drafter(tmp_path, speculative(Method.MTP, num_layers=count), target)
    embed = tensors["layers.0.embed_tokens.weight"] if own else target.embed(torch.arange(VOCAB))
    written = WrittenHead(Method.MTP, tensors, embed)
    tokens, positions = torch.randint(0, VOCAB, (5,)), torch.arange(5)
    hidden = torch.randn(5, HIDDEN, dtype=torch.float64)
    for number in range(count):
        expected = written.module(number, tokens, positions.tolist(), hidden)
        actual = drafter.forward(
            input_ids=tokens, positions=positions, hidden=hidden, attend=attention(), module=number
        )
        assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        logits = target.logits(actual)
        if own:
            logits = actual @ tensors[f"layers.{number}.shared_head.head.weight"].T
        proposed = drafter.propose(actual, torch.zeros(5, dtype=torch.int64), positions, number)
        assert torch.equal(proposed, logits.argmax(-1))
        assert torch.equal(drafter.logits(actual, number), logits)


def test_modules_that_cannot_run_are_refused(tmp_path, target):
    """Another number than planned, experts, latent attention, and a missing tensor, each by its name."""
    tensors = published_modules(FIRST, 2)
    options = {"num_hidden_layers": FIRST, "num_nextn_predict_layers": 2}
    write(tmp_path, tensors, **options, kv_lora_rank=8, n_routed_experts=4)
    with pytest.raises(RunError) as caught:
        load_drafter(tmp_path, speculative(Method.MTP), target)
    for part in ("num_layers: the plan says 1", "kv_lora_rank is not supported", "n_routed_experts is not supported"):
        assert part in str(caught.value)
    gone = f"model.layers.{FIRST + 1}.eh_proj.weight"
    write(tmp_path, {name: tensor for name, tensor in tensors.items() if name != gone}, **options)
    with pytest.raises(RunError, match=r"layers\.1\.eh_proj\.weight is missing"):
        load_drafter(tmp_path, speculative(Method.MTP, num_tokens=2, num_layers=2), target)
    write(tmp_path, tensors, num_hidden_layers=FIRST)
    with pytest.raises(RunError, match="num_layers: the plan says 1"):
        load_drafter(tmp_path, speculative(Method.MTP), target)
