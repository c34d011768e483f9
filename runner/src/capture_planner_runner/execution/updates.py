"""The small updates that graphs hold next to the model: tokens resolved, drafts kept, fields advanced.

Here in torch operators, for any device; ``fused_updates`` has each of them as one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from capture_planner.errors import RunError
from capture_planner.plugins.backend import NULL_SLOT, LayerCache
from capture_planner_runner.execution.fields import Fields, TensorRef

LENGTHS = ("seq_lens", "kv_lens")
"""The names of fields that hold how long each sequence is."""


@attrs.define(eq=False)
class DraftState:
    """State that draft steps pass on, one row per request state; the last row is for padding."""

    token: torch.Tensor
    """``int64[states + 1]``: the last token proposed."""
    hidden: torch.Tensor
    """``[states + 1, hidden_size]``: the hidden state it came from."""
    proposed: torch.Tensor
    """``int64[states + 1, K]``: all tokens proposed in this step."""
    column: torch.Tensor
    """``int64[1]``: where in ``proposed`` the next token goes."""
    is_carried: bool = False
    """Whether the next step reads ``proposed`` before the host does."""

    @classmethod
    def make(
        cls,
        num_states: int,
        most_drafts: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_carried: bool = False,
    ) -> DraftState:
        return cls(
            token=torch.zeros(num_states + 1, dtype=torch.int64, device=device),
            hidden=torch.zeros(num_states + 1, hidden_size, dtype=dtype, device=device),
            proposed=torch.zeros(num_states + 1, most_drafts, dtype=torch.int64, device=device),
            column=torch.zeros(1, dtype=torch.int64, device=device),
            is_carried=is_carried,
        )

    @property
    def padding(self) -> int:
        return self.token.shape[0] - 1

    def buffers(self) -> Iterator[TensorRef]:
        yield from self.written()
        yield from self.carried()

    def written(self) -> Iterator[TensorRef]:
        """Yield what a step writes before it reads it."""
        for name in ("token", "hidden", "column") if self.is_carried else ("token", "hidden", "proposed", "column"):
            yield f"draft_state.{name}", self, name

    def carried(self) -> Iterator[TensorRef]:
        """Yield what one step leaves for the next."""
        if self.is_carried:
            yield "draft_state.proposed", self, "proposed"


@attrs.define(eq=False)
class VerificationOutcome:
    """Result of verification for a step that is launched before the host reads it, one row per request state."""

    most: int
    """Drafts that a step has at most: K."""
    token: torch.Tensor
    """``int64[states]``: the newest token."""
    rejected: torch.Tensor
    """``int32[states]``: drafts of the last step that were rejected."""

    @classmethod
    def make(cls, num_states: int, most_drafts: int, device: torch.device) -> VerificationOutcome:
        return cls(
            most=most_drafts,
            token=torch.zeros(num_states, dtype=torch.int64, device=device),
            rejected=torch.zeros(num_states, dtype=torch.int32, device=device),
        )


@attrs.frozen(kw_only=True, eq=False)
class TokenFields:
    """The fields of one role that go on by a token where every request has one."""

    input_ids: torch.Tensor
    """``int32[tokens]``"""
    idx_mapping: torch.Tensor
    """``int32[reqs]``: -1 of a padded row."""
    positions: torch.Tensor
    """``int64[tokens]``"""
    slot_mapping: torch.Tensor
    """``int64[tokens]``"""
    block_table: torch.Tensor
    """``int32[reqs, pages]``"""
    lengths: tuple[torch.Tensor, ...]
    """``int32[reqs]`` each: the runner's ``seq_lens``, and what backends declared of that kind."""
    page_size: int
    max_model_len: int

    @classmethod
    def of(cls, fields: Fields, page_size: int, max_model_len: int) -> TokenFields:
        """Take them from a role's fields; raises ``RunError`` for lengths that are not ``int32``."""
        for buffer in fields:
            if buffer.field.name in LENGTHS and buffer.tensor.dtype != torch.int32:
                raise RunError(f"{buffer.key} is declared {buffer.field.dtype}; lengths are int32, declare it so")
        return cls(
            **{name: fields[name] for name in ("input_ids", "idx_mapping", "positions", "slot_mapping", "block_table")},
            lengths=tuple(b.tensor for b in fields if b.field.name in LENGTHS),
            page_size=page_size,
            max_model_len=max_model_len,
        )


@attrs.frozen(kw_only=True, eq=False)
class VerificationInputs:
    """One step of the target, as the drafter goes on from it; padding left out."""

    fields: TokenFields
    """The target's."""
    starts: torch.Tensor
    """``int32[R + 1]``: where the rows of each request begin."""
    counts: torch.Tensor
    """``int32[R]``: rows of each that are read, the last ones: its drafts and one more; none in a prompt."""
    answers: torch.Tensor
    """``int64[T]``: what the target says after each row that is read."""
    most: int
    """The largest of ``counts`` that there can be."""
    accepted: torch.Tensor | None = None
    """``int32[R, any]``: in the first column, how many drafts of each request are accepted whatever the target says;
    None: those it says."""


@attrs.frozen(kw_only=True, eq=False)
class StepAhead:
    """A step whose fields are filled as if the step before kept all of its drafts; padding left out.

    In the rows of a request that it does not hold for, the first id is negative: -1 is its newest token, and -1 - i the
    i-th draft that was proposed after it. They are what ``VerificationOutcome`` and ``DraftState`` have.
    """

    target: TokenFields
    prefill: TokenFields
    """The draft prefill's, on the same rows."""
    starts: torch.Tensor
    """``int32[R + 1]``: where the rows of each request begin."""
    most: int
    """The most rows of a request that is past its prompt."""
    accepted: torch.Tensor | None
    """``int32[R, 1 + K]``: drafts of each request that are accepted, by how many of the step before were rejected;
    the number goes to the first column. None: acceptance is not synthetic."""


class Updates:
    """Updates of caches, fields and draft state inside a forward, with torch operators."""

    def store(self, cache: LayerCache, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys and values ``[T, num_kv_heads, head_dim]`` into ``slots int64[T]``.

        Padded tokens all name the null slot; which of them stays there does not matter.
        """
        # By page: pages may lie apart, and then no view has all slots in a row.
        size = cache.keys.shape[1]
        at = slots // size, slots % size
        for held, new in ((cache.keys, keys), (cache.values, values)):
            new = new.to(held.dtype)
            if held.itemsize == 1:  # no operator copies rows of eight-bit floats
                held, new = held.view(torch.uint8), new.view(torch.uint8)
            held.index_put_(at, new)

    def taken(self, ids: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Return ``int64[T]``: the ids, and where one is negative the answer ``-1 - id`` of ``answers``."""
        # torch.where computes both sides, so the index must be in range for ids that are tokens already.
        return torch.where(ids < 0, answers[(-1 - ids).clamp(min=0).long()], ids.long())

    def entered(self, state: DraftState, idx_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``int64[R]`` twice: the state's row of each request, and the token it goes on from.

        Padded rows have the state's last row and the token 0: their content is arbitrary, and an
        embedding must not be looked up for it.
        """
        rows = _state_rows(state, idx_mapping)
        return rows, torch.where(idx_mapping < 0, 0, state.token[rows])

    def keep(self, state: DraftState, idx_mapping: torch.Tensor, tokens: torch.Tensor, *, first: bool) -> None:
        """Store one proposed token ``int64[R]`` of each request; ``first``: it is the step's first."""
        if first:
            # On the device, since a graph cannot take the column from the host.
            state.column.zero_()
        rows, width = _state_rows(state, idx_mapping), state.proposed.shape[1]
        state.token.index_copy_(0, rows, tokens)
        state.proposed.view(-1).index_copy_(0, rows * width + state.column, tokens)
        # After the last draft the column stays: one further is the first place of the next request.
        state.column.add_(1).clamp_(max=width - 1)

    def advance(self, token_fields: TokenFields, rows: int, tokens: torch.Tensor | None = None) -> None:
        """Step every real row: position, length and slot; held at the model's end, on the null slot.

        ``tokens int64[rows]`` become the next input ids, where they are given.
        """
        real = token_fields.idx_mapping[:rows] >= 0
        positions = token_fields.positions[:rows]
        # Past the model's end, a position would index past rope and pages.
        moved = real & (positions + 1 < token_fields.max_model_len)
        positions.add_(moved)
        page = torch.gather(token_fields.block_table[:rows], 1, (positions // token_fields.page_size).unsqueeze(1))
        slot = page.squeeze(1).long() * token_fields.page_size + positions % token_fields.page_size
        token_fields.slot_mapping[:rows].copy_(torch.where(moved, slot, NULL_SLOT))
        for lengths in token_fields.lengths:
            lengths[:rows].add_(moved)
        if tokens is not None:
            ids = token_fields.input_ids[:rows]
            # Padded rows keep the fill of the field.
            ids.copy_(torch.where(real, tokens, ids))

    def correct(self, step: StepAhead, state: DraftState, outcome: VerificationOutcome) -> None:
        """Bring a step that was filled ahead to what verification kept of the one before.

        Positions and lengths go back by the rejected drafts, slots follow, and ids become tokens: the rows of a request
        begin after what it has, wherever that is. Other requests, and padding, are left as they are.
        """
        starts, rows = step.starts[:-1].long(), len(step.starts) - 1
        states = step.target.idx_mapping[:rows].long()
        # Decided before the loop, which replaces the negative ids.
        unread = step.target.input_ids[starts] < 0
        back = torch.where(unread, outcome.rejected[states], 0)
        drafted = torch.cat([outcome.token.unsqueeze(1), state.proposed[: len(outcome.token)]], dim=1)
        for number in range(step.most):
            inside = unread & (number < step.starts[1:] - step.starts[:-1])
            # A mask as an index waits for the device, which the fused kernel does not.
            at, request = starts[inside] + number, inside.nonzero().squeeze(1)
            ids = step.target.input_ids[at]
            token = drafted[states[inside], (-1 - ids).clamp(min=0).long()]
            step.target.input_ids[at] = torch.where(ids < 0, token.to(ids.dtype), ids)
            for fields in (step.target, step.prefill):
                position = fields.positions[at] - back[inside]
                page = fields.block_table[request, position // fields.page_size].long()
                fields.positions[at] = position
                fields.slot_mapping[at] = page * fields.page_size + position % fields.page_size
        for lengths in (*step.target.lengths, *step.prefill.lengths):
            lengths[:rows].sub_(back)
        if step.accepted is not None:
            step.accepted[:, 0] = step.accepted.gather(1, back.long().unsqueeze(1)).squeeze(1)

    def prepare_drafts(
        self,
        verified: VerificationInputs,
        prefill: TokenFields,
        last: torch.Tensor,
        decode: TokenFields | None,
        outcome: VerificationOutcome | None = None,
    ) -> None:
        """Verify the target's batch, and bring the drafter's fields to what was kept of it.

        Written are the draft prefill's input ids at the rows that were read (each token shifted by one),
        ``last int32[reqs]`` (the last row of each request that was kept), and, of the first draft decode,
        positions, lengths and slots, held at the model's end; also the ``outcome`` for the next step, where
        that does not wait for the host.
        """
        start, end, read = verified.starts[:-1], verified.starts[1:], verified.counts
        given = None if verified.accepted is None else verified.accepted[:, 0]
        drafts = (read - 1).clamp(min=0)
        first, rows = (end - 1 - drafts).long(), len(read)
        accepted, agrees = torch.zeros_like(read), read > 0
        for number in range(verified.most):
            inside = number < read
            at = torch.where(inside, first + number, 0)  # 0: any row, for requests with fewer drafts
            answer = verified.answers[at]
            drafted = number < drafts
            draft = verified.fields.input_ids[torch.where(drafted, first + number + 1, 0)]
            agrees = agrees & drafted & (draft == answer if given is None else number < given)
            accepted += agrees
            token = torch.where(agrees, draft.to(answer.dtype), answer)
            prefill.input_ids[at[inside]] = token[inside].to(prefill.input_ids.dtype)
        kept = end - start - drafts + accepted
        last[:rows] = start + kept - 1
        if outcome is not None:
            states = verified.fields.idx_mapping[:rows].long()
            outcome.rejected[states] = drafts - accepted
            # The row after the last draft that was accepted says the newest token; inside a prompt nobody reads it.
            outcome.token[states] = verified.answers[first + accepted]
        if decode is None:
            return
        computed = verified.fields.positions[start.long()] + kept
        position = computed.clamp(max=decode.max_model_len - 1)
        page = torch.gather(decode.block_table[:rows], 1, (position // decode.page_size).unsqueeze(1))
        slot = page.squeeze(1).long() * decode.page_size + position % decode.page_size
        decode.positions[:rows] = position
        # At the model's end the last position is drafted again, and must not write over its own key.
        decode.slot_mapping[:rows] = torch.where(computed == position, slot, NULL_SLOT)
        for lengths in decode.lengths:
            lengths[:rows] = position + 1


def _state_rows(state: DraftState, idx_mapping: torch.Tensor) -> torch.Tensor:
    return torch.where(idx_mapping < 0, state.padding, idx_mapping).long()
