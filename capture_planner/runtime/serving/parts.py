"""What a plan is executed with, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from capture_planner.modes import Role
from capture_planner.runtime.eager_check.record import ComparisonLog
from capture_planner.runtime.execution.bodies import TargetBody
from capture_planner.runtime.execution.fields import tensor_of
from capture_planner.runtime.execution.padding import Write
from capture_planner.runtime.execution.role import ForwardObserver, RoleRun
from capture_planner.runtime.execution.updates import DraftState, TokenFields, Updates, VerificationOutcome
from capture_planner.runtime.options import ExecutionPolicy
from capture_planner.runtime.serving.inputs import DraftRows


@attrs.frozen(kw_only=True, eq=False)
class Parts:
    """What a plan is executed with."""

    policy: ExecutionPolicy
    roles: Mapping[Role, RoleRun]
    target: TargetBody
    state: DraftState | None
    outcome: VerificationOutcome | None
    """What verification leaves for a step that is launched before the host has read it; None: none is."""
    accepted_places: int
    """Numbers of synthetic acceptance that each row has, see ``fields.accepted_field``."""
    draft_rows: DraftRows | None
    """The rows of the first draft pass; None without a drafter."""
    apply: Callable[[Sequence[Write]], None]
    """Brings buffers of any number of roles up to date."""
    updates: Updates
    token_fields: Mapping[Role, TokenFields]
    """Each role's fields that advance by a token."""
    observer: ForwardObserver
    """Watches the forwards; where graphs are compared, those that are compared too."""
    comparison: ComparisonLog | None
    """Where comparisons of graphs with eager forwards are noted; None: nothing is compared."""

    @property
    def kv_cache(self) -> int:
        """Bytes of the KV cache, over all layers of target and drafter, and of the recurrent states."""
        caches = (cache for role in self.roles.values() for _, cache in role.attention.caches())
        tensors = [tensor for cache in caches for tensor in (cache.keys, cache.values)]
        tensors += [cache.states for role in self.roles.values() for cache in role.recurrent.caches]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    @property
    def buffers(self) -> int:
        """Bytes of fields, outputs and workspaces, each counted once."""
        tensors = (tensor_of(held) for role in self.roles.values() for held in role.persistent())
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()) - self.kv_cache
