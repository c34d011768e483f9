"""Verify what was served: each row and token against the same model in a higher precision, over the same tokens.

The reference goes over each prompt with the tokens that were served, not with its own. So one token that differs,
where two are as likely, does not make everything after it differ. What may be off is measured: two exact runs in the
model's own dtype, of other batch shapes, are compared with the reference too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import attrs
import torch

from capture_planner.errors import RunError
from capture_planner.records.batch import Entry
from capture_planner.runtime.eager_check.agreement import INTEGERS
from capture_planner.runtime.ledger import RequestResult
from capture_planner.runtime.models.fp8 import FP8
from capture_planner.runtime.models.protocols import Adapters, LayeredModel, TargetModel, Weight
from capture_planner.runtime.verification.dense import DenseForward, WiderWeights
from capture_planner.runtime.verification.record import Deviation, LayerScale, OutputCheck, number
from capture_planner.runtime.verification.rows import RowKeeper, ServedRows
from capture_planner.runtime.verification.scales import ComparedRows, scales

MARGIN = 2.0
"""One row or token may be off by so many times the worst of the exact runs: a maximum of a sample is too small."""
MEAN_MARGIN = 1.5
"""The mean over all rows may be so many times the mean of the exact runs."""
FLOOR = 1e-5
"""What is allowed without any noise, relative: norms and rotary angles are computed in float32 in any dtype."""
GROSS = 0.05
"""Rows that are further off say nothing of a scale of a percent or so in one layer."""
CHUNKS = 32
"""In how many forwards the second exact run computes a batch of sequences."""
VOCABULARY_ROWS = 256
"""Rows of logits at a time."""


@attrs.frozen(kw_only=True)
class Output:
    """What one request was given."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """At least one."""
    is_cut_off: bool
    adapter: int
    """Its LoRA adapter, counted from 1; 0: none."""
    is_whole: bool
    """Whether these are all tokens that were asked for, and no more."""

    @classmethod
    def of(cls, prompt: tuple[int, ...], served: RequestResult, *, is_whole: bool) -> Output:
        return cls(
            prompt=prompt,
            tokens=served.tokens,
            adapter=served.adapter,
            is_cut_off=served.finished is None,
            is_whole=is_whole,
        )


def refuse_infinite(model: TargetModel) -> None:
    """Raise ``RunError`` for weights that make every comparison of tokens meaningless: NaN has no likeliest token."""
    for name, module, attribute in model.weights():
        weight = getattr(module, attribute)
        weight = weight.float() if weight.dtype is FP8 else weight  # torch has no isfinite for it
        if weight.is_floating_point() and not torch.isfinite(weight).all():
            raise RunError(f"{model.name}: {name} has NaN or infinity, so tokens cannot be verified; check the weights")


def weight_sums(weights: Iterable[Weight]) -> dict[str, int]:
    """Return a sum over the bits of each weight: another one shows that serving changed the weight."""
    found = {}
    for name, module, attribute in weights:
        tensor = getattr(module, attribute).detach().contiguous()
        if tensor.element_size() in INTEGERS:
            found[name] = int(tensor.view(-1).view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64))
    return found


@torch.no_grad()
def check_output(
    model: LayeredModel,
    adapters: Adapters | None,
    answers: Mapping[str, Output],
    keeper: RowKeeper,
    *,
    sums: Mapping[str, int],
    device: torch.device,
    kv_dtype: torch.dtype,
    progress: Callable[[str], None] = lambda name: None,
) -> OutputCheck:
    """Verify the answers to requests, by their names, and the rows that the target's forwards left.

    :param sums: ``weight_sums`` of model and adapters before they served.
    :param progress: called after each forward over all sequences.

    Raises ``RunError`` where there is no memory for the weights of the reference.
    """
    names = tuple(answers)
    sequences = tuple(answers[name].prompt + answers[name].tokens for name in names)
    served = keeper.rows(dict(zip(names, sequences, strict=True)))
    dense = DenseForward(
        model=model,
        sequences=tuple(tokens[:-1] for tokens in sequences),
        device=device,
        kv_dtype=kv_dtype,
        adapters=adapters,
        adapter=tuple(answer.adapter for answer in answers.values()),
    )
    exact_dtype = torch.float64 if model.dtype in (torch.float32, torch.float64) else torch.float32
    weights = [*model.weights(), *(() if adapters is None else adapters.weights())]
    wider = _wider(model, weights, exact_dtype)
    changed = [name for name, total in weight_sums(weights).items() if sums.get(name, total) != total]
    runs = []
    for chunks, rounds in ((1, False), (CHUNKS, True)):
        runs.append(dense.hidden(chunks=chunks, rounds_weights=rounds))
        progress(f"exact run {len(runs)}")
    with wider():
        exact = dense.hidden()
    progress("reference")

    begins = _begins(dense.sequences, names)
    tokens, equal, token_faults = _tokens(model, answers, begins, exact, runs, wider)
    at = torch.tensor([begins[name] + position for name, position in served.places], device=device, dtype=torch.int64)
    rows, mean_bound, errors, row_faults = _rows(exact, runs, served, at)
    found: tuple[LayerScale, ...] = ()
    if exact_dtype is torch.float32 and len(at) and rows.bound is not None:
        chosen = (errors <= max(rows.bound, GROSS)).nonzero()[:, 0]
        ordinary = ComparedRows(
            hidden=served.hidden[chosen],
            tokens=at[chosen],
            served_by=[_kinds(served.entries[index]) for index in chosen.tolist()],
            modes=frozenset(_mode(entry) for entry in served.entries if entry is not None),
        )
        found = tuple(scales(dense, exact, (runs[0], runs[1]), ordinary, wider, progress))
    per_request = {**token_faults, **{k: v for k, v in row_faults.items() if k not in token_faults}}
    for name, position in served.absent:
        per_request.setdefault(name, f"{name}: no forward read its own token at position {position}")
    for name, answer in answers.items():
        if not answer.is_whole:
            per_request.setdefault(name, f"{name}: {len(answer.tokens)} tokens are not the number that was asked for")
    return OutputCheck(
        reference=str(exact_dtype).removeprefix("torch."),
        runs=(f"{_plain(model.dtype)}, whole sequences", f"{_plain(model.dtype)}, {CHUNKS} chunks, rounded weights"),
        requests=len(names),
        cut_off=sum(answer.is_cut_off for answer in answers.values()),
        tokens=tokens,
        equal=equal,
        rows=rows,
        mean_bound=mean_bound,
        scales=found,
        not_kept=served.not_kept,
        faults=(
            *([f"serving changed the weights {', '.join(changed[:3])}"] if changed else ()),
            *_no_bound(tokens, rows),
            *_infinite(errors),
            *per_request.values(),
            *_mean_fault(rows, mean_bound),
            *_scale_faults(found),
        ),
        differing=tuple(name for name in names if name in per_request),
    )


def _kinds(entry: Entry | None) -> tuple[str, ...]:
    return ("eager",) if entry is None else (_mode(entry), str(entry))


def _mode(entry: Entry) -> str:
    return f"{entry.mode.value} graphs"


def _wider(
    model: LayeredModel, weights: Iterable[Weight], dtype: torch.dtype
) -> Callable[[], AbstractContextManager[None]]:
    if model.dtype is dtype:
        return nullcontext
    try:
        return WiderWeights(weights, dtype).used
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"there is no memory for the weights of {model.name} in {_plain(dtype)}, which outputs are verified with; "
            "verify a model of fewer layers, or compare with eager forwards instead (--compare)"
        ) from error


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _begins(sequences: Sequence[Sequence[int]], names: Sequence[str]) -> dict[str, int]:
    """Return the row of each sequence's first token."""
    begins, rows = {}, 0
    for name, tokens in zip(names, sequences, strict=True):
        begins[name] = rows
        rows += len(tokens)
    return begins


def _tokens(
    model: LayeredModel,
    answers: Mapping[str, Output],
    begins: Mapping[str, int],
    exact: torch.Tensor,
    runs: Sequence[torch.Tensor],
    wider: Callable[[], AbstractContextManager[None]],
) -> tuple[Deviation, int, dict[str, str]]:
    """Return how far the logits of the served tokens are from the best ones, how many are the best, and faults."""
    places = [(name, at) for name, answer in answers.items() for at in range(len(answer.tokens))]
    rows = [begins[name] + len(answers[name].prompt) - 1 + at for name, at in places]
    said = torch.tensor([answers[name].tokens[at] for name, at in places], device=exact.device)
    losses: list[torch.Tensor] = []
    spreads: list[torch.Tensor] = []
    largest = 0.0
    read = torch.tensor(rows, device=exact.device)
    for first in range(0, len(rows), VOCABULARY_ROWS):
        some, tokens = read[first : first + VOCABULARY_ROWS], said[first : first + VOCABULARY_ROWS]
        with wider():
            logits = model.logits(exact[some])
        inside = (tokens >= 0) & (tokens < logits.shape[1])
        chosen = logits.gather(1, torch.where(inside, tokens, 0)[:, None])[:, 0]
        losses.append(torch.where(inside, logits.amax(1) - chosen, torch.inf).double())
        largest = max(largest, float(logits.abs().max()))
        for run in runs:
            apart = model.logits(run[some]).to(logits.dtype) - logits
            spreads.append((apart.amax(1) - apart.amin(1)).double())
    loss, spread = torch.cat(losses), torch.cat(spreads)
    deviation = _deviation(loss, spread, FLOOR * largest)
    faults: dict[str, str] = {}
    for index in _beyond(loss, deviation.bound):
        name, at = places[index]
        faults.setdefault(
            name,
            f"{name}: the logit of its token {at} ({int(said[index])}) is {number(_finite(loss[index]))} below the "
            f"best one, allowed {number(deviation.bound)}",
        )
    return deviation, int((loss == 0).sum()), faults


def _rows(
    exact: torch.Tensor, runs: Sequence[torch.Tensor], served: ServedRows, at: torch.Tensor
) -> tuple[Deviation, float | None, torch.Tensor, dict[str, str]]:
    """Return how far rows are from the reference, what their mean may be, each one's error, and faults."""
    norm = exact.norm(dim=1).double()
    noise = torch.cat([(run.to(exact.dtype) - exact).norm(dim=1).double() / norm for run in runs])
    errors = torch.empty(0, dtype=torch.float64, device=exact.device)
    if len(at):
        errors = (served.hidden.to(exact.dtype) - exact[at]).norm(dim=1).double() / norm[at]
    deviation = _deviation(errors, noise, FLOOR)
    faults: dict[str, str] = {}
    for index in _beyond(errors, deviation.bound):
        name, position = served.places[index]
        entry = served.entries[index]
        faults.setdefault(
            name,
            f"{name}: the hidden state at position {position} ({'eager' if entry is None else entry}) is off by "
            f"{number(_finite(errors[index]))} of its norm, allowed {number(deviation.bound)}",
        )
    mean = deviation.noise_mean
    return deviation, None if mean is None else max(MEAN_MARGIN * mean, FLOOR), errors, faults


def _deviation(values: torch.Tensor, noise: torch.Tensor, floor: float) -> Deviation:
    worst = _finite(noise.max())
    bound = None if worst is None else max(MARGIN * worst, floor)
    return Deviation(
        compared=len(values),
        within=len(values) - len(_beyond(values, bound)),
        bound=bound,
        worst=_finite(values.max()) if len(values) else 0.0,
        mean=_finite(values.mean()) if len(values) else 0.0,
        noise_worst=worst,
        noise_mean=_finite(noise.mean()),
    )


def _beyond(values: torch.Tensor, bound: float | None) -> list[int]:
    """Return which values are beyond a bound, or no finite numbers."""
    wrong = ~torch.isfinite(values)
    if bound is not None:
        wrong |= values > bound
    found: list[int] = wrong.nonzero()[:, 0].tolist()
    return found


def _finite(value: torch.Tensor) -> float | None:
    found = float(value)
    return found if math.isfinite(found) else None


def _no_bound(*deviations: Deviation) -> Iterator[str]:
    if any(deviation.bound is None for deviation in deviations):
        yield "an exact run of the model is not finite in its own dtype, so there is no bound; run it in bfloat16"


def _infinite(errors: torch.Tensor) -> Iterator[str]:
    if count := int((~torch.isfinite(errors)).sum()):
        yield f"{count:,} of {len(errors):,} hidden states have NaN or infinity"


def _mean_fault(rows: Deviation, bound: float | None) -> Iterator[str]:
    if rows.mean is not None and bound is not None and rows.mean > bound:
        yield f"the mean row is off by {number(rows.mean)} of its norm, allowed {number(bound)}"


def _scale_faults(found: Sequence[LayerScale]) -> Iterator[str]:
    """Yield the worst scale of all rows, and of each graph where all rows together are within their bounds."""
    wrong = sorted(
        (s for s in found if not s.is_within), key=lambda scale: abs(scale.error) / scale.bound, reverse=True
    )
    every = [scale for scale in wrong if scale.served_by == "all"]
    worst = {scale.served_by: scale for scale in reversed(every or wrong)}
    yield from map(str, worst.values())
