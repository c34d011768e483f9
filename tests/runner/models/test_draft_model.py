"""Draft models and parallel heads: loaded from folders, and refused where they cannot draft for the target."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from capture_planner.errors import RunError
from capture_planner.records.model import Method
from capture_planner_runner.models.drafters import load_drafter
from support.published_heads import CONFIG, DRAFTED, HIDDEN, VOCAB, published, random_tensor, speculative, write

MASK = 7


@pytest.fixture(scope="module", autouse=True)
def generator():
    """Leave the global generator as it was before this file."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


def saved(folder, **changes):
    """Save a random Llama with the numbers of a draft model; return it."""
    config = LlamaConfig(**(CONFIG | {"num_hidden_layers": 2, "max_position_embeddings": 4096} | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.save_pretrained(folder)
    return model


def test_a_draft_model_says_what_its_folder_says(tmp_path, target, attention):
    """Its tokens are those of the library, whatever the target's states are."""
    own = saved(tmp_path)
    plan = speculative(Method.DRAFT_MODEL, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
    drafter = load_drafter(tmp_path, plan, target)
    tokens, positions = torch.randint(0, VOCAB, (6,)), torch.arange(6)
    hidden = torch.full((6, target.hidden_size), torch.nan, dtype=torch.float64)
    states = drafter.forward(input_ids=tokens, positions=positions, hidden=hidden, attend=attention())
    expected = own(tokens[None]).logits[0].argmax(-1)
    assert torch.equal(drafter.logits(states).argmax(-1), expected)
    assert torch.equal(drafter.propose(states, torch.zeros(6, dtype=torch.int64), positions + 1), expected)
    with pytest.raises(RunError, match="reads no states of the target"):
        drafter.combine(hidden)


def test_draft_models_that_cannot_draft_for_the_target_are_refused(tmp_path, target):
    """Another vocabulary, other numbers than planned, and fewer positions, all in one error."""
    saved(tmp_path, vocab_size=VOCAB + 1, max_position_embeddings=8)
    with pytest.raises(RunError) as caught:
        load_drafter(tmp_path, speculative(Method.DRAFT_MODEL, num_layers=1), target)
    for part in (f"has {VOCAB + 1} tokens, the target {VOCAB}", "num_layers: the plan says 1", "at most 8 positions"):
        assert part in str(caught.value)


def test_a_mask_token_is_read_by_each_of_its_names(tmp_path, target):
    """And refused where there is none, or one that the target does not have."""
    plan = speculative(
        Method.DRAFT_MODEL, parallel_drafting=True, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    saved(tmp_path)
    config = tmp_path / "config.json"
    plain = json.loads(config.read_text())
    for value in (None, VOCAB, "seven"):
        config.write_text(json.dumps(plain | {"pard_token": value}))
        with pytest.raises(RunError, match=f"the mask token of parallel drafting is {value}"):
            load_drafter(tmp_path, plan, target)
    for name in ("mask_token_id", "pard_token", "ptd_token_id"):
        config.write_text(json.dumps(plain | {name: MASK}))
        assert load_drafter(tmp_path, plan, target).mask_token == MASK


@pytest.mark.parametrize("method", [Method.EAGLE, Method.EAGLE3])
def test_a_parallel_head_has_a_mask_and_another_ignores_it(method, tmp_path, target):
    """Its state is in the file, in the width that the head reads; vLLM skips it where drafts are made in a chain."""
    width = (3 if method is Method.EAGLE3 else 1) * HIDDEN
    mask = random_tensor(1, 1, width)
    reduced = {"draft_vocab_size": DRAFTED} if method is Method.EAGLE3 else {}
    write(tmp_path, published(method) | {"mask_hidden": mask}, num_hidden_layers=1, ptd_token_id=MASK, **reduced)
    drafter = load_drafter(tmp_path, speculative(method, parallel_drafting=True), target)
    assert drafter.mask_token == MASK
    assert torch.equal(drafter.mask_hidden, mask.flatten().to(drafter.mask_hidden.dtype))
    assert load_drafter(tmp_path, speculative(method), target).mask_hidden is None
    write(tmp_path, published(method), num_hidden_layers=1, ptd_token_id=MASK, **reduced)
    with pytest.raises(RunError, match=f"mask_hidden is missing, expected shape .{width}"):
        load_drafter(tmp_path, speculative(method, parallel_drafting=True), target)
