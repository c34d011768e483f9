"""A whole model as a drafter: it reads only tokens, and has the target's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from capture_planner.errors import RunError
from capture_planner.records.model import DataType, Model, Speculative
from capture_planner_runner.models.huggingface import HuggingFaceModel, load_target
from capture_planner_runner.models.loading import contradictions, locate, mask_token_of
from capture_planner_runner.models.protocols import Attend, TargetModel, Weight


class DraftLanguageModel:
    """A ``Drafter`` that is a complete language model: embeddings, layers and output embeddings.

    :param mask_token: what stands in the rows of drafts yet to be made, where it drafts in parallel (PARD).
    """

    def __init__(self, model: HuggingFaceModel, mask_token: int = 0) -> None:
        self._model = model
        self.name, self.windows = model.name, model.windows
        self.num_layers, self.hidden_size = model.num_layers, model.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = model.num_heads, model.num_kv_heads, model.head_dim
        self.aux_layers: tuple[int, ...] = ()
        self.mask_token, self.mask_hidden = mask_token, None

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """Raise ``RunError``: nothing of the target is read."""
        raise RunError(f"{self.name} is a draft model, which reads no states of the target")

    def forward(
        self, *, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        """Return its hidden states ``[T, hidden_size]``; ``hidden`` is not read."""
        states, _ = self._model.forward(input_ids=input_ids, embeddings=None, positions=positions, attend=attend)
        return states

    def propose(
        self, hidden: torch.Tensor, state_indices: torch.Tensor, positions: torch.Tensor, module: int = 0
    ) -> torch.Tensor:
        """Return its likeliest token after each row, ``int64[N]``."""
        return self._model.likeliest(hidden)

    def set_answer(self, state_index: int, tokens: tuple[int, ...]) -> None:
        """Do nothing: it is not given answers."""

    def weights(self) -> Iterator[Weight]:
        return self._model.weights()


def load_draft_model(
    source: Path | None, speculative: Speculative, target: TargetModel, *, seed: int = 0
) -> DraftLanguageModel:
    """Return the model at ``source``, or a Llama of the plan's numbers with random weights, as ``load_target`` does.

    Raises ``RunError`` for a model with another vocabulary than the target's, with fewer positions, with multimodal
    rope, or with other numbers than the plan has.
    """
    draft = speculative.model
    if draft.latent is not None or draft.sinks:
        raise RunError("speculative.model: no draft model here has latent attention or sinks; leave them out")
    _, module, attribute = next(target.weights())
    device: torch.device = getattr(module, attribute).device
    shape = Model(
        name="draft-model",
        num_layers=draft.num_layers,
        num_heads=draft.num_heads or target.num_heads,
        num_kv_heads=draft.num_kv_heads or target.num_kv_heads,
        head_dim=draft.head_dim or target.head_dim,
        max_model_len=target.max_model_len,
        hidden_size=target.hidden_size if source is None else None,
        vocab_size=draft.vocab_size or target.vocab_size,
        dtype=DataType(str(target.dtype).removeprefix("torch.")),
    )
    model = load_target(source, shape, device=device, dtype=target.dtype, seed=seed, among=target.among)
    names = ("num_layers", "num_heads", "num_kv_heads", "head_dim")
    pairs = [(name, getattr(shape, name), getattr(model, name)) for name in names]
    problems = contradictions("speculative.model", pairs, model.name)
    if model.vocab_size != target.vocab_size:
        problems.append(
            f"speculative.model: {model.name} has {model.vocab_size} tokens, the target {target.vocab_size}; they need "
            "the same vocabulary"
        )
    if model.max_model_len < target.max_model_len:
        problems.append(
            f"speculative.model: {model.name} has at most {model.max_model_len} positions, the target "
            f"{target.max_model_len}"
        )
    if model.mrope or model.sinks:
        kind = "multimodal rope" if model.mrope else "attention sinks"
        problems.append(f"speculative.model: {model.name} has {kind}, which no draft model here has")
    if problems:
        raise RunError("\n".join(problems))
    mask = 0
    if speculative.parallel_drafting:
        mask = target.vocab_size - 1 if source is None else mask_token_of(locate(source), target.vocab_size)
    return DraftLanguageModel(model, mask)
