"""Tensor parallelism: a model's layers are spread over ranks as transformers' ``tp_plan`` says.

The plan is the library's. What it says is done here, with plain tensors: the library's own weights are DTensors, which
have no one address that a graph could hold and a guard could compare, and it neither repeats key/value heads where
there are fewer of them than ranks nor reduces with anything but ``torch.distributed``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from capture_planner.errors import RunError
from capture_planner_runner.models.fp8 import COLUMNS, ROWS, Fp8Experts, Fp8Linear
from capture_planner_runner.ranks.collectives import Collectives

_WHOLE = frozenset(
    {
        "replicate",
        "replicated_with_grad_allreduce",
        "embedding_rowwise",
        "embedding_colwise",
        "colwise_gather_output",
        "colwise_rep",
        "rowwise_split_input",
        "rowwise_rep",
        "local_params",
    }
)
"""Styles of modules with the same complete output on every rank. They are not divided, and need no collective."""

_KEYS_AND_VALUES = ("k_proj", "v_proj")


@torch.library.custom_op("capture_planner::all_reduce", mutates_args=())
def _traced_sum(partial: torch.Tensor) -> torch.Tensor:
    """Stand for an all-reduce in a traced forward: no compiler looks into it, moves it, or leaves it out."""
    raise NotImplementedError("this operator is traced, and never run")


@_traced_sum.register_fake
def _(partial: torch.Tensor) -> torch.Tensor:
    return partial.new_empty(partial.shape)


ALL_REDUCE = torch.ops.capture_planner.all_reduce.default


def sum_of(partial: torch.Tensor, among: Collectives) -> torch.Tensor:
    """Return the sum over ranks; in a trace, in which nothing communicates, an operator that stands for it."""
    if isinstance(partial, FakeTensor):
        total: torch.Tensor = ALL_REDUCE(partial)
        return total
    return among.all_reduce(partial)


def _linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, among: Collectives) -> torch.Tensor:
    """Multiply by the columns that this rank has, sum over ranks, then add the bias, once."""
    total = sum_of(nn.functional.linear(inputs, weight), among)
    return total if bias is None else total + bias


class PartialLinear(nn.Module):
    """The columns of a linear layer that this rank has: outputs are summed over ranks, then the bias is added."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, among: Collectives) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._among = among

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _linear(inputs, self.weight, self.bias, self._among)


class PartialFp8Linear(Fp8Linear):
    """The same layer with an FP8 weight."""

    def __init__(self, part: Fp8Linear, among: Collectives) -> None:
        super().__init__(part.weight, part.weight_scale, part.bias, part.block, part.dtype)
        self._among = among

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _linear(inputs, self.matrix(inputs.dtype), self.bias, self._among)


class Vocabulary:
    """The tokens of which each rank has the output embeddings, and so the logits; of one rank all."""

    def __init__(self, vocab_size: int, among: Collectives) -> None:
        self._among = among
        self._bounds = [vocab_size * rank // among.size for rank in range(among.size + 1)]

    def keep(self, head: nn.Module) -> None:
        """Leave of output embeddings, a linear layer, this rank's rows."""
        if self._among.size > 1:
            _keep_rows(head, slice(*self._bounds[self._among.rank :][:2]))

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens ``[N, vocab_size]``, of those that each rank has."""
        if self._among.size == 1:
            return part
        widths = [end - first for first, end in itertools.pairwise(self._bounds)]
        # Padded to one width, as a gather needs, and cut again.
        parts = self._among.gather(nn.functional.pad(part, (0, max(widths) - part.shape[1])))
        return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], dim=1)

    def likeliest(self, part: torch.Tensor) -> torch.Tensor:
        """Return the token with the largest logit, ``int64[N]``: of each rank's best, not of all logits."""
        tokens = part.argmax(dim=-1)
        if self._among.size == 1:
            return tokens
        values = part.gather(1, tokens.unsqueeze(1)).squeeze(1)
        # Exact in float64: any logit, and any token.
        best = self._among.gather(torch.stack([values.double(), (tokens + self._bounds[self._among.rank]).double()]))
        return best[:, 1].gather(0, best[:, 0].argmax(dim=0, keepdim=True))[0].long()


def spread(
    model: nn.Module, tp_plan: Mapping[str, str], *, kv_heads: int, among: Collectives, within: nn.Module | None = None
) -> None:
    """Leave of each layer of ``model`` what this rank has of it, in place.

    :param tp_plan: by module or parameter, with ``*`` for a number, the style of transformers.
    :param kv_heads: of a layer, over all ranks. Of fewer than there are ranks, neighbours have the same one.
    :param within: a part of ``model``, outside of which nothing is changed.
    :raises RunError: for a style that is not known here, a width that the ranks cannot share, and FP8 blocks that they
        would cut.
    """
    if among.size == 1:
        return
    inside = set((within or model).modules())
    parents = {name: module for name, module in model.named_modules() if module in inside}
    names = {*parents, *(name for name, _ in model.named_parameters() if name.rpartition(".")[0] in parents)}
    for name, style in _matches(tp_plan, names):
        parent, _, leaf = name.rpartition(".")
        owner, module = parents.get(parent, model), parents.get(name)
        place = among.rank, among.size
        is_of_keys = leaf in _KEYS_AND_VALUES
        # Fewer KV heads than ranks: neighbours hold copies of the same one.
        if is_of_keys and kv_heads < among.size:
            place = among.rank * kv_heads // among.size, kv_heads
        part = _Part(name, *place, most=kv_heads if is_of_keys else None)
        if style in _WHOLE:
            continue
        if style in _OF_PARAMETERS and isinstance(module, (Fp8Linear, Fp8Experts)):
            axis, _ = _OF_PARAMETERS[style]
            share = module.part(axis, part.slice_of(module.weight.shape[axis], module.unit(axis)))
            if isinstance(share, Fp8Linear) and axis == COLUMNS:
                share = PartialFp8Linear(share, among)
            setattr(owner, leaf, share)
            continue
        if style == "colwise" and isinstance(module, nn.Linear):
            _keep_rows(module, part.slice_of(module.out_features))
        elif style == "rowwise" and isinstance(module, nn.Linear):
            columns = part.slice_of(module.in_features)
            setattr(owner, leaf, PartialLinear(module.weight[:, columns].clone(), module.bias, among))
        elif style == "moe_tp_experts" and module is not None:
            # Each rank has a part of every expert's width, so the outputs are partial sums.
            module.register_forward_hook(lambda module, inputs, output: sum_of(output, among))
        elif style in _OF_PARAMETERS and module is None:
            axis, blocks = _OF_PARAMETERS[style]
            whole: torch.Tensor = getattr(owner, leaf)
            # A vector, such as a bias, is divided along its only axis.
            setattr(owner, leaf, nn.Parameter(part.of(whole, max(whole.ndim + axis, 0), blocks), requires_grad=False))
        else:
            raise RunError(
                f"{name}: transformers spreads it in the style {style}, which is not executed; plan it with "
                "parallel.tensor 1"
            )


_OF_PARAMETERS = {
    "colwise": (ROWS, 1),
    "rowwise": (COLUMNS, 1),
    "packed_colwise": (ROWS, 2),
    "packed_rowwise": (COLUMNS, 2),
}
"""Divided axis, and number of blocks along it (gate and up), for FP8 weights and parameters of other modules."""


def _matches(tp_plan: Mapping[str, str], names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield each module or parameter that the plan has a style for."""
    for pattern, style in tp_plan.items():
        matcher = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        yield from ((name, style) for name in sorted(names) if matcher.fullmatch(name))


class _Part:
    """The part of a width that a rank has: the one at ``place`` of ``count`` equal ones. There are at most ``most``."""

    def __init__(self, name: str, place: int, count: int, most: int | None = None) -> None:
        self._name, self._place, self._count, self._most = name, place, count, most

    def slice_of(self, width: int, unit: int = 1) -> slice:
        """Return this rank's part of a width, in units of neighbours that stay together."""
        if width % self._count:
            raise RunError(
                f"{self._name}: {self._count} ranks cannot share a width of {width}; plan it with a parallel.tensor "
                "that divides it"
            )
        each = width // self._count
        if each % unit:
            most = min(width // unit, self._most or width)
            counts = [str(count) for count in range(2, most + 1) if width % (count * unit) == 0]
            raise RunError(
                f"{self._name}: {self._count} ranks would cut blocks of {unit} that have one FP8 scale, as each has "
                f"{each} of {width}; plan it with parallel.tensor {' or '.join(['1', *counts])}"
            )
        return slice(self._place * each, (self._place + 1) * each)

    def of(self, whole: torch.Tensor, axis: int, blocks: int) -> torch.Tensor:
        """Return a copy of this rank's part of each of ``blocks`` equal blocks along an axis."""
        # Gate and up are one tensor: each rank needs its part of both.
        chunks = whole.chunk(blocks, axis)
        rows = self.slice_of(chunks[0].shape[axis])
        return torch.cat([chunk.narrow(axis, rows.start, rows.stop - rows.start) for chunk in chunks], axis).clone()


def _keep_rows(linear: nn.Module, rows: slice) -> None:
    for name, whole in list(linear.named_parameters(recurse=False)):
        # A view would keep the whole weight in memory.
        setattr(linear, name, nn.Parameter(whole[rows].clone(), requires_grad=False))
