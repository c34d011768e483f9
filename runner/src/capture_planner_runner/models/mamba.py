"""Mamba-2 layers of transformers' models, as two recurrences each that the runner keeps the states of.

Any number of requests are in one batch, and a step goes on from where each has stopped, so neither the convolution nor
the scan of the library serves. Both are recurrences ``h = exp(d) * h + x``, element by element:

- The convolution's last inputs are in a ring of as many lanes as it has taps. A token overwrites the lane of its
  position, and leaves the others.
- The state ``[heads, head_dim, state]`` fades by the step size, and gains the input times B.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig

from capture_planner_runner.models.interface import Call

FORGOTTEN = -1024.0
"""The logarithm of the decay of what is overwritten, whose exponential is 0. Sums of it are exact in float32."""

_PARTS = ("in_proj", "conv1d", "act", "A_log", "D", "dt_bias", "norm", "out_proj", "time_step_limit")
_SIZES = ("intermediate_size", "conv_dim", "conv_kernel_size", "num_heads", "head_dim", "n_groups", "ssm_state_size")


@attrs.frozen(eq=False)
class Mamba2:
    """What runs one mixer of a model."""

    mixer: Any
    first: int
    """Number of its first recurrence in the model; its second one follows."""

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of the state of each recurrence."""
        mixer = self.mixer
        return mixer.conv_kernel_size * mixer.conv_dim, mixer.num_heads * mixer.head_dim * mixer.ssm_state_size

    def forward(self, hidden_states: torch.Tensor, *, capture_planner: Call, **_: Any) -> torch.Tensor:
        """Return ``[1, T, hidden_size]`` for ``hidden_states`` of that shape, in place of the mixer's own forward."""
        mixer = self.mixer
        sizes = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
        gate, inputs, steps = mixer.in_proj(hidden_states)[0].split(sizes, dim=-1)
        scanned = self._scanned(self._convolved(inputs, capture_planner), steps, capture_planner)
        out: torch.Tensor = mixer.out_proj(mixer.norm(scanned[None], gate[None]).to(hidden_states.dtype))
        return out

    def _convolved(self, inputs: torch.Tensor, call: Call) -> torch.Tensor:
        """Return what the convolution makes of ``inputs [T, conv_dim]``."""
        assert call.positions is not None, "a forward of recurrent layers has positions"
        convolution, lanes = self.mixer.conv1d, self.mixer.conv_kernel_size
        # How many tokens ago each lane was written.
        age = (call.positions[:, None] - torch.arange(lanes, device=inputs.device)) % lanes
        is_own = (age == 0)[:, :, None].expand(-1, -1, inputs.shape[-1])
        added = torch.where(is_own, inputs[:, None], 0.0)
        # The lane of a token forgets what it held, and the others keep it.
        decays = torch.where(is_own, FORGOTTEN, 0.0).to(inputs.dtype)
        ring = call.attend.recur(self.first, added.flatten(1), decays.flatten(1)).view(added.shape)
        taps = convolution.weight[:, 0].T.flip(0)[age]  # the last tap is of the token itself
        wide = torch.promote_types(inputs.dtype, torch.float32)
        found = (ring.to(wide) * taps).sum(1)
        if convolution.bias is not None:
            found = found + convolution.bias
        out: torch.Tensor = self.mixer.act(found.to(inputs.dtype))
        return out

    def _scanned(self, inputs: torch.Tensor, steps: torch.Tensor, call: Call) -> torch.Tensor:
        """Return ``[T, intermediate_size]`` for the convolved ``inputs [T, conv_dim]``, and ``steps [T, heads]``."""
        mixer, wide = self.mixer, torch.promote_types(inputs.dtype, torch.float32)
        grouped = mixer.n_groups * mixer.ssm_state_size
        values, keys, queries = torch.split(inputs.to(wide), [mixer.intermediate_size, grouped, grouped], dim=-1)
        values = values.reshape(-1, mixer.num_heads, mixer.head_dim)
        keys, queries = (
            # With the size of the result given, torch reads no device value to find it.
            each.reshape(-1, mixer.n_groups, mixer.ssm_state_size).repeat_interleave(
                mixer.num_heads // mixer.n_groups, dim=1, output_size=mixer.num_heads
            )
            for each in (keys, queries)
        )
        size = functional.softplus(steps.to(wide) + mixer.dt_bias).clamp(*mixer.time_step_limit)
        added = (size[:, :, None] * values)[..., None] * keys[:, :, None]
        decays = (size * -mixer.A_log.to(wide).exp())[:, :, None, None].expand_as(added)
        states = call.attend.recur(self.first + 1, added.flatten(1), decays.flatten(1)).view(added.shape)
        out: torch.Tensor = (states * queries[:, :, None]).sum(-1) + mixer.D[:, None] * values
        return out.flatten(1)


def has_mixers(config: PreTrainedConfig) -> bool:
    """Say whether the recurrent layers of a configuration are Mamba-2 mixers."""
    return hasattr(config, "mamba_n_heads")


def mixers_of(model: nn.Module) -> Iterator[Mamba2]:
    """Yield what runs each Mamba-2 mixer of a model, in the model's order."""
    # By their parts: the mixer of each model is a class of its own.
    mixers = (each for each in model.modules() if all(hasattr(each, name) for name in (*_PARTS, *_SIZES)))
    return (Mamba2(mixer, 2 * number) for number, mixer in enumerate(mixers))
