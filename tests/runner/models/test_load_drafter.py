"""Loading a drafter head: every wrong tensor is listed, and what contradicts the plan is refused."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from capture_planner.errors import RunError
from capture_planner.records.model import Latent, Method
from capture_planner_runner.models.drafters import load_drafter
from support.published_heads import CONFIG, DRAFTED, HIDDEN, VOCAB, WIDTH, published, speculative, write

METHODS = (Method.EAGLE, Method.EAGLE3)


@pytest.fixture(scope="module", autouse=True)
def generator():
    """Leave the global generator as it was before this file."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
def test_every_wrong_tensor_is_listed_once(method, data, tmp_path_factory, target):
    """Missing, unexpected and misshapen ones, in one error; where there are none, it loads."""
    tensors, optional = published(method), {"t2d"}
    names = st.sampled_from(sorted(tensors.keys() - optional))
    gone, bent = data.draw(st.sets(names, max_size=3)), data.draw(st.sets(names, max_size=3))
    bent, added = bent - gone, data.draw(st.sets(st.sampled_from(["head.bias", "layers.7.norm"])))
    broken = {name: tensor for name, tensor in tensors.items() if name not in gone}
    broken |= {name: torch.zeros(3, 1, dtype=tensors[name].dtype) for name in bent}
    broken |= {name: torch.zeros(2, 5) for name in added}
    folder = tmp_path_factory.mktemp("head")
    reduced = {"draft_vocab_size": DRAFTED} if method is Method.EAGLE3 else {}
    write(folder, broken, num_hidden_layers=1, **reduced)
    if not gone | bent | added:
        load_drafter(folder, speculative(method), target)
    else:
        with pytest.raises(RunError) as caught:
            load_drafter(folder, speculative(method), target)
        lines, file = str(caught.value).split("\n")[:-1], folder / "model.safetensors"

        def plain(name):
            return name.replace("midlayer.", "layers.0.")

        expected = [
            *(f"{folder}: {plain(n)} is missing, expected shape {list(tensors[n].shape)}" for n in gone),
            *(f"{file}: {plain(n)} has shape [3, 1], expected {list(tensors[n].shape)}" for n in bent),
            *(f"{file}: {n} is unexpected, shape [2, 5]" for n in added),
        ]
        assert sorted(lines) == sorted(expected)


def test_a_folder_that_contradicts_the_plan_is_refused_with_all_of_it(tmp_path, target):
    """Every number, and every option that would be computed otherwise."""
    changes = {"num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 60, "hidden_act": "gelu"}
    write(tmp_path, {}, **changes, norm_output=True, eagle_config={"use_aux_hidden_state": False})
    with pytest.raises(RunError) as caught:
        load_drafter(tmp_path, speculative(Method.EAGLE3, vocab_size=DRAFTED, head_dim=16), target)
    lines = str(caught.value).split("\n")
    wanted = ("num_layers", "num_kv_heads", "head_dim", "model.vocab_size", "vocab_size 60", "gelu")
    for part in (*wanted, "norm_output", "use_aux_hidden_state"):
        assert sum(part in line for line in lines) == 1
    assert len(lines) == 8


def test_heads_that_cannot_run_are_refused(tmp_path, target):
    """More drafts than modules, latent attention, sinks, and vocabularies that do not fit."""
    for plan, reason in (
        (speculative(Method.MTP, num_layers=2), "3 drafts of 2 modules, one token each"),
        (speculative(Method.MTP, vocab_size=DRAFTED), "only eagle3"),
        (speculative(Method.DRAFT_MODEL, sinks=True), "latent attention or sinks"),
        (speculative(Method.DRAFT_MODEL, vocab_size=DRAFTED), "need the same vocabulary"),
        (speculative(Method.EAGLE, latent=Latent(kv_lora_rank=4, rope_head_dim=2)), "latent attention"),
        (speculative(Method.EAGLE3, sinks=True), "sinks"),
        (speculative(Method.EAGLE, vocab_size=DRAFTED), "only eagle3"),
        (speculative(Method.EAGLE3, vocab_size=VOCAB + 1), "no larger one"),
    ):
        with pytest.raises(RunError, match=reason):
            load_drafter(None, plan, target)
    tensors = published(Method.EAGLE3)
    write(tmp_path, tensors | {"d2t": tensors["d2t"] + VOCAB}, num_hidden_layers=1, draft_vocab_size=DRAFTED)
    with pytest.raises(RunError, match="d2t leads outside"):
        load_drafter(tmp_path, speculative(Method.EAGLE3), target)
    twice = tensors["d2t"].index_fill(0, torch.tensor([1]), int(tensors["d2t"][0]) - 1)
    write(tmp_path, tensors | {"d2t": twice}, num_hidden_layers=1, draft_vocab_size=DRAFTED)
    with pytest.raises(RunError, match="to a token of the target twice"):
        load_drafter(tmp_path, speculative(Method.EAGLE3), target)
    write(tmp_path, tensors | {"model.fc.weight": tensors["fc.weight"].clone()}, num_hidden_layers=1)
    with pytest.raises(RunError, match="under another name too"):
        load_drafter(tmp_path, speculative(Method.EAGLE3), target)


def test_folders_that_hold_no_head_are_refused(tmp_path, target):
    """Nothing there, no JSON, an object of another kind, pickled weights, a broken file, two of one name."""

    def message():
        with pytest.raises(RunError) as caught:
            load_drafter(tmp_path, speculative(Method.EAGLE), target)
        return str(caught.value)

    config = tmp_path / "config.json"
    assert "no config.json" in message()
    config.write_text("{")
    assert "cannot be read as JSON" in message()
    config.write_text("[]")
    assert "expected a JSON object" in message()
    config.write_text(json.dumps(CONFIG | {"num_hidden_layers": "one"}))
    assert "not the configuration of a Llama head" in message()
    config.write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "convert them to safetensors" in message()
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert "cannot be read as safetensors" in message()
    tensors = published(Method.EAGLE)
    write(tmp_path, tensors, num_hidden_layers=1)
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    save_file({"fc.weight": tensors["fc.weight"]}, tmp_path / "more.safetensors")
    assert "keep one of them" in message()


def test_a_configuration_alone_makes_a_random_head(tmp_path, target):
    """With its numbers; the name says that the weights are random."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1, "draft_vocab_size": DRAFTED}))
    drafter = load_drafter(tmp_path / "config.json", speculative(Method.EAGLE3), target, seed=2)
    assert drafter.name == f"Eagle3 of {tmp_path.name}, random weights (seed 2)"
    assert (drafter.vocab_size, drafter.hidden_size, drafter.head_dim) == (DRAFTED, HIDDEN, WIDTH)


def test_a_head_of_another_width_brings_its_own_embeddings(tmp_path, target):
    """EAGLE-3 mixes the target's states down to its own width; EAGLE cannot."""
    narrow = {"hidden_size": 16, "num_hidden_layers": 1, "draft_vocab_size": DRAFTED}
    write(tmp_path, {}, **narrow)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"without embed_tokens\.weight"):
        load_drafter(tmp_path, speculative(Method.EAGLE3), target)
    with pytest.raises(RunError, match="hidden_size 16, the target has 24"):
        load_drafter(tmp_path, speculative(Method.EAGLE), target)
