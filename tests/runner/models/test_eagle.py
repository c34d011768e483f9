"""EAGLE and EAGLE-3 heads: from published files, against a forward written out token by token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from capture_planner.errors import RunError
from capture_planner.records.model import Method
from capture_planner_runner.models.drafters import load_drafter
from support.published_heads import DRAFTED, EPS, HIDDEN, VOCAB, WrittenHead, published, speculative, write

METHODS = (Method.EAGLE, Method.EAGLE3)


def steps(drafter, count, start=5):
    """Return inputs of one forward: tokens, positions from ``start``, and hidden states."""
    tokens = torch.randint(0, VOCAB, (count,))
    hidden = torch.randn(count, HIDDEN, dtype=torch.float64)
    if drafter.aux_layers:
        hidden = drafter.combine(torch.randn(count, len(drafter.aux_layers) * HIDDEN, dtype=torch.float64))
    return tokens, torch.arange(start, start + count), hidden


@pytest.fixture(scope="module", autouse=True)
def generator():
    """Leave the global generator as it was before this file."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"embeddings": True}, {"bias": True}, {"attention_bias": True}],
    ids=["shared embeddings", "own embeddings", "bias", "attention bias"],
)
def test_a_published_head_computes_what_is_written_out(method, layers, options, tmp_path, target, attention):
    """Loaded from its folder, with what it does not have taken from the target."""
    tensors = published(method, layers, **options)
    changes = {"num_hidden_layers": layers, "attention_bias": options.get("attention_bias", False)}
    reduced = {"draft_vocab_size": DRAFTED} if method is Method.EAGLE3 else {}
    folder = write(tmp_path, tensors, **changes, **reduced)
    drafter = load_drafter(folder, speculative(method, num_layers=layers), target)
    tokens, positions, hidden = steps(drafter, 6)
    embed = tensors.get("embed_tokens.weight", target.embed(torch.arange(VOCAB)))
    expected = WrittenHead(method, tensors, embed).forward(tokens, positions.tolist(), hidden)
    actual = drafter.forward(input_ids=tokens, positions=positions, hidden=hidden, attend=attention())
    assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert drafter.name == f"{type(drafter).__name__} of {tmp_path.name}"
    assert drafter.num_layers == layers


def test_a_norm_before_the_residual_is_heeded(tmp_path, target, attention):
    """The residual stream then begins with the normed state."""
    tensors = published(Method.EAGLE3)
    write(tmp_path, tensors, num_hidden_layers=1, draft_vocab_size=DRAFTED, norm_before_residual=True)
    drafter = load_drafter(tmp_path, speculative(Method.EAGLE3), target)
    tokens, positions, hidden = steps(drafter, 4)
    written = WrittenHead(Method.EAGLE3, tensors, target.embed(torch.arange(VOCAB)), norm_before_residual=True)
    actual = drafter.forward(input_ids=tokens, positions=positions, hidden=hidden, attend=attention())
    expected = written.forward(tokens, positions.tolist(), hidden)
    assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_auxiliary_states_are_mixed_by_fc(tmp_path, target):
    """Three states of the target, side by side, make one."""
    tensors = published(Method.EAGLE3)
    write(tmp_path, tensors, num_hidden_layers=1, draft_vocab_size=DRAFTED)
    aux = torch.randn(4, 3 * HIDDEN, dtype=torch.float64)
    combined = load_drafter(tmp_path, speculative(Method.EAGLE3), target).combine(aux)
    assert_close(combined, aux @ tensors["fc.weight"].T)
    with pytest.raises(RunError, match="last hidden state"):
        load_drafter(None, speculative(Method.EAGLE), target).combine(aux)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("prefix", "first"), [("", "layers.0."), ("model.", "midlayer."), ("model.", "layers.0.")])
def test_all_published_namings_are_the_same_head(method, prefix, first, tmp_path, target):
    """With the prefix and without, and whatever the first layer is called."""
    tensors = published(method, reduced=False)
    plain, other = tmp_path / "plain", tmp_path / "other"
    plain.mkdir()
    other.mkdir()
    write(plain, tensors, num_hidden_layers=1)
    free = {"d2t", "t2d", "lm_head.weight"}
    renamed = {
        (name if name in free else prefix + name).replace("midlayer.", first): tensor
        for name, tensor in tensors.items()
    }
    write(other, renamed | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, num_hidden_layers=1)
    one, same = (load_drafter(folder, speculative(method), target) for folder in (plain, other))
    assert one.state_dict().keys() == same.state_dict().keys()
    assert all(torch.equal(tensor, same.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_a_reduced_vocabulary_proposes_what_the_whole_one_would(tmp_path, target):
    """The likeliest of the target's tokens, where all that the head does not know are out."""
    tensors = published(Method.EAGLE3)
    write(tmp_path, tensors, num_hidden_layers=1, draft_vocab_size=DRAFTED)
    drafter = load_drafter(tmp_path, speculative(Method.EAGLE3, vocab_size=DRAFTED), target)
    hidden = torch.randn(300, HIDDEN, dtype=torch.float64)
    normed = hidden / torch.sqrt((hidden**2).mean(-1, keepdim=True) + EPS) * tensors["norm.weight"]
    logits = torch.full((300, VOCAB), -torch.inf, dtype=torch.float64)
    logits[:, tensors["t2d"]] = normed @ tensors["lm_head.weight"].T
    proposed = drafter.propose(hidden, torch.zeros(300, dtype=torch.int64), torch.arange(300))
    assert torch.equal(proposed, logits.argmax(dim=-1))
    assert proposed.dtype == torch.int64
    assert len(proposed.unique()) > 1


def test_eagle_proposes_with_the_targets_logits(target):
    """On its hidden states as they are."""
    drafter = load_drafter(None, speculative(Method.EAGLE), target)
    hidden = torch.randn(40, HIDDEN, dtype=torch.float64)
    proposed = drafter.propose(hidden, torch.zeros(40, dtype=torch.int64), torch.arange(40))
    assert torch.equal(proposed, target.logits(hidden).argmax(dim=-1))
    assert drafter.aux_layers == ()


@pytest.mark.parametrize("method", METHODS)
def test_a_random_head_follows_the_seed_alone(method, target):
    """The same seed makes the same head, d2t included; the global generator does not notice."""
    plan = speculative(method, **({"vocab_size": DRAFTED} if method is Method.EAGLE3 else {}))
    before = torch.random.get_rng_state()
    one, same, other = (load_drafter(None, plan, target, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert one["fc.weight"].dtype == target.dtype


@given(st.integers(1, VOCAB), st.integers(0, 100))
def test_a_random_vocabulary_is_a_subset_in_order(target, size, seed):
    """d2t leads to as many of the target's tokens as are drafted, each once, none outside."""
    drafter = load_drafter(None, speculative(Method.EAGLE3, vocab_size=size), target, seed=seed)
    tokens = torch.arange(size) if drafter.d2t is None else torch.arange(size) + drafter.d2t
    assert (tokens.diff() > 0).all()
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < VOCAB
    hidden = torch.randn(9, HIDDEN, dtype=torch.float64)
    proposed, logits = drafter.propose(hidden, tokens, tokens), drafter.logits(hidden)
    assert torch.equal(proposed, logits.argmax(-1))
    assert (logits.isfinite().sum(0).nonzero()[:, 0] == tokens).all()


@given(st.integers(1, 40))
def test_the_layers_that_are_tapped_are_there(tiny, target, depth):
    """Those of vLLM where the target is deep enough, else the nearest that it has."""

    class Deep:
        def __getattr__(self, name):
            return getattr(target, name)

        num_layers = depth

    layers = load_drafter(None, speculative(Method.EAGLE3), Deep()).aux_layers
    assert len(layers) == 3
    assert all(0 <= layer < depth for layer in layers)
    if depth >= 6:
        assert layers == (2, depth // 2, depth - 3)


def test_the_configuration_says_which_layers_are_tapped(tmp_path, target):
    """At its top or under eagle_config; layers that the target does not have are an error."""
    ids, tensors = "eagle_aux_hidden_state_layer_ids", published(Method.EAGLE3)
    for changes in ({ids: [0, 3, 4]}, {"eagle_config": {ids: [0, 3, 4]}}):
        write(tmp_path, tensors, num_hidden_layers=1, draft_vocab_size=DRAFTED, **changes)
        assert load_drafter(tmp_path, speculative(Method.EAGLE3), target).aux_layers == (0, 3, 4)
    write(tmp_path, tensors, num_hidden_layers=1, draft_vocab_size=DRAFTED, **{ids: [1, 2, 5]})
    with pytest.raises(RunError, match="the target has 5 layers"):
        load_drafter(tmp_path, speculative(Method.EAGLE3), target)


@pytest.mark.parametrize("method", METHODS)
def test_no_step_reads_a_value_on_the_host(method, target, attention, no_host_reads):
    """Neither the forward, nor combining, nor proposing."""
    plan = speculative(method, **({"vocab_size": DRAFTED} if method is Method.EAGLE3 else {}))
    drafter, tokens = load_drafter(None, plan, target), torch.arange(5, dtype=torch.int32)
    aux, hidden = (torch.randn(5, n * HIDDEN, dtype=torch.float64) for n in (3, 1))
    attend, positions = attention(), torch.arange(5)
    with no_host_reads():
        if drafter.aux_layers:
            hidden = drafter.combine(aux)
        hidden = drafter.forward(input_ids=tokens, positions=positions, hidden=hidden, attend=attend)
        assert drafter.propose(hidden, positions, positions).shape == (5,)


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_all_that_is_its_own(method, target):
    """Each name leads to the tensor; nothing of the target is among them."""
    drafter = load_drafter(None, speculative(method), target)
    listed = {name: getattr(module, attribute) for name, module, attribute in drafter.weights()}
    assert drafter.state_dict().keys() <= listed.keys()
    assert all(listed[name] is value for name, value in drafter.named_parameters())
    theirs = {id(getattr(module, attribute)) for _, module, attribute in target.weights()}
    assert not theirs & {id(tensor) for tensor in listed.values()}
