"""Transformers' continuous batching, as it is compared with: the same weights, all tokens, or a reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from capture_planner_runner.bench import throughput as module  # noqa: E402
from capture_planner_runner.bench.rig import Absence  # noqa: E402
from capture_planner_runner.bench.throughput import Load  # noqa: E402
from support.tiny import planned, rigged  # noqa: E402


def test_transformers_copy_has_equal_weights_in_separate_storage() -> None:
    """Equal in every tensor; attention is transformers' own."""
    target = rigged(planned(0)).model
    copy = module.copied(target)
    mine = {name: getattr(module, attribute) for name, module, attribute in target.weights()}
    state = copy.state_dict()
    assert state
    for name, tensor in state.items():
        assert torch.equal(tensor, mine[name])
        assert tensor.data_ptr() != mine[name].data_ptr()
    assert copy.config._attn_implementation == module.ATTENTION


def test_transformers_options_are_known_to_the_installed_version() -> None:
    """The two that a comparison stands on are in every version that is supported."""
    options = module.config_of()
    assert options.use_cuda_graph is True
    assert options.allow_block_sharing is False


Lengths = st.lists(st.integers(0, 4), max_size=4)


@given(Lengths, st.integers(0, 4), st.integers(1, 4), st.booleans())
def test_incomplete_results_of_transformers_are_rejected(
    lengths: list[int], requests: int, wanted: int, breaks: bool
) -> None:
    """The library logs what breaks and returns what it has."""
    done: dict[str, Any] = {
        str(index): SimpleNamespace(error=None, generated_tokens=[0] * length) for index, length in enumerate(lengths)
    }
    if breaks and done:
        done["0"].error = "out of blocks"
    whole = len(lengths) == requests and set(lengths) == {wanted} and not breaks
    if whole:
        module._refuse_incomplete(done, requests, wanted)
    else:
        with pytest.raises(Absence, match="out of blocks" if breaks and done else "instead of"):
            module._refuse_incomplete(done, requests, wanted)


def test_errors_of_transformers_become_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is: our own figure stays, and the sentence names the library."""

    class BrokenBatching:
        def generate_batch(self, **given: object) -> dict[str, object]:
            raise AttributeError("no such thing")

        def destroy_cached_continuous_batching_manager(self) -> None:
            """Nothing was made."""

    rig = rigged(planned(0))
    compared = module._transformers
    monkeypatch.setattr(module, "copied", lambda target: BrokenBatching())
    # All but the comparison runs on the CPU; it alone asks which device this is.
    monkeypatch.setattr(
        module, "_transformers", lambda rig, *rest: compared(attrs.evolve(rig, device=torch.device("cuda")), *rest)
    )
    found = module.throughput(rig, Load(requests=2, prompt=3, output=4), lambda now: None, compare=True)
    assert found.tokens_per_second > 0
    assert found.other is None
    assert found.other_says.startswith("transformers ")
    assert "AttributeError: no such thing" in found.other_says
