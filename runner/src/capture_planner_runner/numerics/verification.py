"""Verify what was served: each row and token against the same model in a higher precision, over the same tokens.

The reference goes over each prompt with the tokens that were served, not with its own. So one token that differs,
where two are as likely, does not make everything after it differ. What may be off is measured: two exact runs in the
model's own dtype, of other batch shapes, are compared with the reference too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import attrs
import torch

from capture_planner.errors import RunError
from capture_planner.records.batch import Entry
from capture_planner_runner.execution.bodies import TargetBody
from capture_planner_runner.execution.inputs import ForwardStep
from capture_planner_runner.execution.role import ForwardObserver, RoleRun
from capture_planner_runner.ledger.rows import RequestResult
from capture_planner_runner.models.fp8 import FP8
from capture_planner_runner.models.protocols import Adapters, LayeredModel, TargetModel, Weight
from capture_planner_runner.numerics.dense import ComparedRows, DenseForward, WiderWeights, scales
from capture_planner_runner.numerics.record import Deviation, LayerScale, OutputCheck, number
from capture_planner_runner.numerics.tolerance import INTEGERS, below_best, finite

MEMORY = 1 << 30
"""Limit of kept hidden states, in bytes."""


@attrs.frozen(eq=False)
class _KeptForward:
    requests: tuple[str, ...]
    starts: list[int]
    positions: torch.Tensor
    """``int64[T]``, as the forward reads them: of a step that runs ahead, the host has upper bounds."""
    entry: Entry | None
    ids: torch.Tensor
    """``int64[T]``, as the forward reads them."""
    hidden: torch.Tensor | None
    """``[T, hidden_size]``; None where the memory was used up."""


@attrs.frozen(kw_only=True, eq=False)
class ServedRows:
    """The hidden states of served sequences."""

    hidden: torch.Tensor
    """``[rows, hidden_size]``"""
    places: tuple[tuple[str, int], ...]
    """The request and the position of each row."""
    entries: tuple[Entry | None, ...]
    """The graph that computed each row; None: eager."""
    not_kept: int
    absent: tuple[tuple[str, int], ...]
    """The first position of each request for which no forward read the request's own token."""


class RowKeeper(ForwardObserver):
    """Copies ids, positions and hidden states of the target's forwards, on the device and in its stream's order.

    Nothing is captured and nothing waits for the device: graphs and batches are those of a run without it.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._kept: list[_KeptForward] = []
        self._requests: tuple[str, ...] = ()
        self._memory = memory

    def batch(self, requests: Sequence[str]) -> None:
        self._requests = tuple(requests)

    @contextmanager
    def forward(self, role: RoleRun, step: ForwardStep) -> Iterator[None]:
        """Copy what the target reads and leaves."""
        body, inputs = role.body, step.inputs
        # Without requests these are the dummy rows of an idle replica.
        if not isinstance(body, TargetBody) or not self._requests:
            yield
            return
        tokens = inputs.num_tokens
        if body.embeddings is None:
            # Before the forward: a graph may end with the fields of the next step.
            ids = body.input_ids(tokens).clone()
        else:
            assert inputs.input_ids is not None, "embeddings are made of ids that the host knows"
            ids = torch.from_numpy(inputs.input_ids.copy())
        positions = body.fields["positions"][:tokens].clone()
        yield
        size = body.hidden[:tokens].nbytes
        hidden = body.hidden[:tokens].clone() if size <= self._memory else None
        self._memory -= size if hidden is not None else 0
        starts = inputs.query_start_loc.tolist()
        self._kept.append(_KeptForward(self._requests, starts, positions, step.entry, ids, hidden))

    def rows(self, sequences: Mapping[str, Sequence[int]]) -> ServedRows:
        """Return every row that belongs to these sequences: prompts and outputs, by the requests' names.

        Rows at and behind a draft that was refused belong to none, and nothing follows from the last token.
        """
        places: list[tuple[str, int]] = []
        entries: list[Entry | None] = []
        hidden: list[torch.Tensor] = []
        read = {name: [False] * (len(tokens) - 1) for name, tokens in sequences.items()}
        not_kept = 0
        for kept in self._kept:
            ids, positions, chosen = kept.ids.tolist(), kept.positions.tolist(), []
            for name, (start, end) in zip(kept.requests, itertools.pairwise(kept.starts), strict=True):
                # A request without a token is not among the sequences, and its rows are not compared.
                tokens = sequences.get(name, ())
                for row in range(start, end):
                    at = positions[row]
                    # A refused draft: this row and those behind it belong to no sequence.
                    if at >= len(tokens) - 1 or ids[row] != tokens[at]:
                        break
                    read[name][at] = True
                    chosen.append((row, (name, at)))
            if kept.hidden is None:
                not_kept += len(chosen)
                continue
            places += [place for _, place in chosen]
            entries += [kept.entry] * len(chosen)
            hidden.append(kept.hidden[[row for row, _ in chosen]])
        absent = tuple((name, seen.index(False)) for name, seen in read.items() if not all(seen))
        rows = torch.cat(hidden) if hidden else torch.empty(0)
        return ServedRows(hidden=rows, places=tuple(places), entries=tuple(entries), not_kept=not_kept, absent=absent)


MARGIN = 2.0
"""Deviation of one row or token that is allowed, as a multiple of the worst exact run's: a sample underestimates the
maximum."""
MEAN_MARGIN = 1.5
"""Mean deviation of all rows that is allowed, as a multiple of the exact runs' mean."""
FLOOR = 1e-5
"""Relative deviation that is allowed without noise: norms and rotary angles are computed in float32 in any dtype."""
GROSS = 0.05
"""Relative error above which a row says nothing of a scale of a percent or so in one layer."""
CHUNKS = 32
"""Forwards in which the second exact run computes a batch of sequences."""
VOCABULARY_ROWS = 256
"""Rows of logits at a time."""


def refuse_infinite(model: TargetModel) -> None:
    """Raise ``RunError`` for weights that make every comparison of tokens meaningless: NaN has no likeliest token."""
    for name, module, attribute in model.weights():
        weight = getattr(module, attribute)
        weight = weight.float() if weight.dtype is FP8 else weight  # torch has no isfinite for it
        if weight.is_floating_point() and not torch.isfinite(weight).all():
            raise RunError(f"{model.name}: {name} has NaN or infinity, so tokens cannot be verified; check the weights")


def weight_sums(weights: Iterable[Weight]) -> dict[str, int]:
    """Return a checksum over the bits of each weight, which shows whether serving changed it."""
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
    prompts: Mapping[str, tuple[int, ...]],
    served: Sequence[RequestResult],
    keeper: RowKeeper,
    *,
    incomplete: Collection[str] = (),
    sampled: Mapping[str, tuple[int, ...]] | None = None,
    sums: Mapping[str, int],
    device: torch.device,
    kv_dtype: torch.dtype,
    progress: Callable[[str], None] = lambda name: None,
) -> OutputCheck:
    """Verify the tokens of requests, and the rows that the target's forwards left.

    :param prompts: by request.
    :param served: requests with at least one token.
    :param incomplete: names of requests that finished with another number of tokens than was asked for.
    :param sampled: by request, the tokens that an eager run sampled; None: tokens are the likeliest.
    :param sums: ``weight_sums`` of model and adapters before they served.
    :param progress: called after each forward over all sequences.

    Raises ``RunError`` where there is no memory for the weights of the reference.
    """
    sequences = {each.name: prompts[each.name] + each.tokens for each in served}
    names = tuple(sequences)
    kept = keeper.rows(sequences)
    dense = DenseForward(
        model=model,
        # No forward reads the last token of a request.
        sequences=tuple(tokens[:-1] for tokens in sequences.values()),
        device=device,
        kv_dtype=kv_dtype,
        adapters=adapters,
        adapter=tuple(each.adapter for each in served),
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

    # Row of each sequence's first token.
    ends = itertools.accumulate(map(len, dense.sequences), initial=0)
    begins = dict(zip(names, ends, strict=False))
    if sampled is None:
        tokens, equal, token_faults = _tokens(model, prompts, served, begins, exact, runs, wider)
    else:
        tokens, equal, token_faults = _sampled_tokens(served, sampled)
    at = torch.tensor([begins[name] + position for name, position in kept.places], device=device, dtype=torch.int64)
    rows, mean_bound, errors, row_faults = _rows(exact, runs, kept, at)
    found: tuple[LayerScale, ...] = ()
    # For models in half precision; in float32 the bound of rows alone is far below such an error.
    if exact_dtype is torch.float32 and len(at) and rows.bound is not None:
        chosen = (errors <= max(rows.bound, GROSS)).nonzero()[:, 0]
        ordinary = ComparedRows(
            hidden=kept.hidden[chosen],
            tokens=at[chosen],
            served_by=[_kinds(kept.entries[index]) for index in chosen.tolist()],
            modes=frozenset(_mode(entry) for entry in kept.entries if entry is not None),
        )
        found = tuple(scales(dense, exact, (runs[0], runs[1]), ordinary, wider, progress))
    # The first fault of each request: of a token before one of a row.
    per_request = token_faults | {name: fault for name, fault in row_faults.items() if name not in token_faults}
    for name, position in kept.absent:
        per_request.setdefault(name, f"{name}: no forward read its own token at position {position}")
    for each in served:
        if each.name in incomplete:
            fault = f"{each.name}: {len(each.tokens)} tokens are not the number that was asked for"
            per_request.setdefault(each.name, fault)
    # Worst first: what concerns all requests, then single ones, then means over many.
    faults = [f"serving changed the weights {', '.join(changed[:3])}"] if changed else []
    if tokens.bound is None or rows.bound is None:
        faults.append(
            "an exact run of the model is not finite in its own dtype, so there is no bound; run it in bfloat16"
        )
    if infinite := int((~torch.isfinite(errors)).sum()):
        faults.append(f"{infinite:,} of {len(errors):,} hidden states have NaN or infinity")
    faults += per_request.values()
    if rows.mean is not None and mean_bound is not None and rows.mean > mean_bound:
        faults.append(f"the mean row is off by {number(rows.mean)} of its norm, allowed {number(mean_bound)}")
    faults += _scale_faults(found)
    return OutputCheck(
        reference=_plain(exact_dtype),
        runs=(f"{_plain(model.dtype)}, whole sequences", f"{_plain(model.dtype)}, {CHUNKS} chunks, rounded weights"),
        requests=len(names),
        cut_off=sum(each.finished is None for each in served),
        tokens=tokens,
        equal=equal,
        is_sampled=sampled is not None,
        rows=rows,
        mean_bound=mean_bound,
        scales=found,
        not_kept=kept.not_kept,
        faults=tuple(faults),
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
            "verify a model of fewer layers, or compare with eager forwards instead (--check tensors)"
        ) from error


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tokens(
    model: LayeredModel,
    prompts: Mapping[str, tuple[int, ...]],
    served: Sequence[RequestResult],
    begins: Mapping[str, int],
    exact: torch.Tensor,
    runs: Sequence[torch.Tensor],
    wider: Callable[[], AbstractContextManager[None]],
) -> tuple[Deviation, int, dict[str, str]]:
    """Return how far the logits of the served tokens are from the best ones, how many are the best, and faults."""
    places = [(each.name, at) for each in served for at in range(len(each.tokens))]
    # The row before a token has its logits.
    rows = [begins[name] + len(prompts[name]) - 1 + at for name, at in places]
    said = torch.tensor([token for each in served for token in each.tokens], device=exact.device)
    losses: list[torch.Tensor] = []
    spreads: list[torch.Tensor] = []
    largest = 0.0
    read = torch.tensor(rows, device=exact.device)
    for first in range(0, len(rows), VOCABULARY_ROWS):
        some, tokens = read[first : first + VOCABULARY_ROWS], said[first : first + VOCABULARY_ROWS]
        with wider():
            logits = model.logits(exact[some])
        losses.append(below_best(tokens, logits).double())
        largest = max(largest, float(logits.abs().max()))
        for run in runs:
            apart = model.logits(run[some]).to(logits.dtype) - logits
            # A shift of all logits changes no token: only their spread counts.
            spreads.append((apart.amax(1) - apart.amin(1)).double())
    loss, spread = torch.cat(losses), torch.cat(spreads)
    deviation = _deviation(loss, spread, FLOOR * largest)
    faults: dict[str, str] = {}
    for index in _beyond(loss, deviation.bound):
        name, at = places[index]
        faults.setdefault(
            name,
            f"{name}: the logit of its token {at} ({int(said[index])}) is {number(finite(loss[index]))} below the "
            f"best one, allowed {number(deviation.bound)}",
        )
    return deviation, int((loss == 0).sum()), faults


def _sampled_tokens(
    served: Sequence[RequestResult], sampled: Mapping[str, tuple[int, ...]]
) -> tuple[Deviation, int, dict[str, str]]:
    """Return how many tokens are those that were sampled eagerly, 0 or 1 off each, and the first other one of each."""
    apart: list[float] = []
    faults: dict[str, str] = {}
    for each in served:
        pairs = list(zip(each.tokens, sampled.get(each.name, ()), strict=False))
        apart += [float(graph != eager) for graph, eager in pairs] + [1.0] * (len(each.tokens) - len(pairs))
        at = next((at for at, (graph, eager) in enumerate(pairs) if graph != eager), len(pairs))
        if at < len(each.tokens):
            eager = f"{pairs[at][1]}" if at < len(pairs) else "none"
            faults[each.name] = f"{each.name}: its token {at} is {each.tokens[at]}, and sampled eagerly {eager}"
    errors = torch.tensor(apart, dtype=torch.float64)
    return _deviation(errors, torch.zeros(1, dtype=torch.float64), 0.0), int((errors == 0).sum()), faults


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
            f"{number(finite(errors[index]))} of its norm, allowed {number(deviation.bound)}",
        )
    mean = deviation.noise_mean
    return deviation, None if mean is None else max(MEAN_MARGIN * mean, FLOOR), errors, faults


def _deviation(values: torch.Tensor, noise: torch.Tensor, floor: float) -> Deviation:
    worst = finite(noise.max())
    bound = None if worst is None else max(MARGIN * worst, floor)
    return Deviation(
        compared=len(values),
        within=len(values) - len(_beyond(values, bound)),
        bound=bound,
        worst=finite(values.max()) if len(values) else 0.0,
        mean=finite(values.mean()) if len(values) else 0.0,
        noise_worst=worst,
        noise_mean=finite(noise.mean()),
    )


def _beyond(values: torch.Tensor, bound: float | None) -> list[int]:
    """Return which values are beyond a bound, or no finite numbers."""
    wrong = ~torch.isfinite(values)
    if bound is not None:
        wrong |= values > bound
    found: list[int] = wrong.nonzero()[:, 0].tolist()
    return found


def _scale_faults(found: Sequence[LayerScale]) -> Iterator[str]:
    """Yield the worst scale of all rows, and of each graph where all rows together are within their bounds."""
    wrong = sorted(
        (s for s in found if not s.is_within), key=lambda scale: abs(scale.error) / scale.bound, reverse=True
    )
    every = [scale for scale in wrong if scale.served_by == "all"]
    worst = {scale.served_by: scale for scale in reversed(every or wrong)}
    yield from map(str, worst.values())
