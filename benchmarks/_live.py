"""The graphs of a running vLLM, changed between two of its steps (vLLM 0.33, model runner V2).

``LiveGraphs`` adds and drops graphs of each role in the pool and with the compiled pieces that the engine has, by the
managers' own ``capture``. What a capture may do at start, and not between steps, is held back (``between_steps``).
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import attrs

from capture_planner.modes import Role
from capture_planner.records.plan import Plan
from capture_planner_vllm.inside import hooks
from capture_planner_vllm.inside.observe_seams import MANAGERS
from capture_planner_vllm.inside.trials import OUTPUTS

WRAPPERS = "vllm.compilation.cuda_graph"
"""Where PIECEWISE graphs of compiled models lie: one table a piece."""

PADDING_SLOT = -1

Graph = tuple[Role, Any]
"""A role, and vLLM's descriptor of one of its graphs."""


@attrs.frozen(kw_only=True)
class GraphTable:
    """What a plan gives one manager: graphs in capture order, and which of them each batch tries."""

    graphs: tuple[Any, ...]
    candidates: Mapping[Any, tuple[Any, ...]]


def table_of(manager: Any, plan: Plan) -> GraphTable:
    """Return what the manager of a running engine would have under a plan; raises ``RuntimeError`` where it cannot."""
    twin = copy.copy(manager)
    twin._candidates, twin._capture_descs = {}, {}
    if not hooks.fill(twin, plan):
        raise RuntimeError(f"{type(manager).__name__}: the plan cannot be applied; the log says why")
    return current_table(twin)


def current_table(manager: Any) -> GraphTable:
    """Return what a manager's tables say now."""
    return GraphTable(
        graphs=tuple(_in_order(desc for listed in manager._capture_descs.values() for desc in listed)),
        candidates={key: tuple(tried) for key, tried in manager._candidates.items()},
    )


def own_table(manager: Any, sizes: Collection[int]) -> GraphTable:
    """Return what vLLM itself would capture with these ``cudagraph_capture_sizes``."""
    twin = copy.copy(manager)
    twin._candidates, twin._capture_descs = {}, {}
    twin.compilation_config = copy.copy(manager.compilation_config)
    object.__setattr__(twin.compilation_config, "cudagraph_capture_sizes", sorted(sizes))
    object.__setattr__(twin.compilation_config, "max_cudagraph_capture_size", max(sizes))
    twin._init_candidates()
    return current_table(twin)


def _in_order(graphs: Iterable[Any]) -> list[Any]:
    """Return graphs in vLLM's capture order: PIECEWISE first, largest first."""
    return sorted(graphs, key=lambda desc: (desc.cg_mode.name == "FULL", -desc.num_tokens))


class LiveGraphs:
    """The graphs of an engine in this process.

    :param managers: the graph managers by role, captured.
    :param capture: captures what ``_capture_descs`` of a role's manager lists.
    :param pieces: the wrappers of each role's compiled pieces.
    """

    def __init__(
        self, managers: Mapping[Role, Any], capture: Callable[[Role], None], pieces: Mapping[Role, Collection[Any]]
    ) -> None:
        self.managers, self._capture, self._pieces = managers, capture, pieces
        self._full = {role: current_table(manager).graphs for role, manager in managers.items()}

    @property
    def graphs(self) -> list[Graph]:
        """All graphs, in capture order."""
        return [(role, desc) for role, held in self._full.items() for desc in held]

    def tables(self, plan: Plan) -> dict[Role, GraphTable]:
        """Return what each role would have under a plan."""
        return {role: table_of(manager, plan) for role, manager in self.managers.items() if role in plan.planned}

    def own(self, sizes: Collection[int]) -> dict[Role, GraphTable]:
        """Return what each role would have by vLLM's own lists for these sizes."""
        return {role: own_table(manager, sizes) for role, manager in self.managers.items()}

    def now(self) -> dict[Role, GraphTable]:
        """Return what each role has."""
        return {role: current_table(manager) for role, manager in self.managers.items()}

    def missing(self, tables: Mapping[Role, GraphTable]) -> list[Graph]:
        """Return the graphs of tables that are not there, in capture order."""
        return [(role, desc) for role, table in tables.items() for desc in table.graphs if desc not in self._full[role]]

    def surplus(self, tables: Mapping[Role, GraphTable]) -> list[Graph]:
        """Return the graphs that are there and that tables do not have."""
        return [(role, desc) for role, table in tables.items() for desc in self._full[role] if desc not in table.graphs]

    def add(self, graphs: Iterable[Graph]) -> None:
        """Capture graphs that are not there yet; after an error none of those is there."""
        wanted: dict[Role, list[Any]] = {}
        for role, desc in graphs:
            if desc not in self._full[role]:
                wanted.setdefault(role, []).append(desc)
        try:
            for role, listed in wanted.items():
                pieces = [desc for desc in listed if desc.cg_mode.name == "PIECEWISE"]
                for part in (pieces, [desc for desc in listed if desc not in pieces]):
                    if part:
                        self._ask(role, part)
                        with _without_outputs(self.managers[role]) if part is pieces else nullcontext():
                            self._capture(role)
                self._full[role] = tuple(_in_order({*self._full[role], *listed}))
        except BaseException:
            for role, listed in wanted.items():
                self._forget(role, listed)
            raise
        finally:
            self._list()

    def _ask(self, role: Role, graphs: Iterable[Any]) -> None:
        """Let the managers list these graphs of one role alone: the drafter's two are captured together."""
        for each, manager in self.managers.items():
            # An empty list still says that the manager has something to capture.
            manager._capture_descs = {mode: [] for mode in manager._capture_descs}
            for desc in _in_order(graphs) if each is role else ():
                manager._capture_descs.setdefault(desc.cg_mode, []).append(desc)

    def _list(self) -> None:
        """Let the managers list all graphs that are there."""
        for role, manager in self.managers.items():
            manager._capture_descs = {}
            for desc in self._full[role]:
                manager._capture_descs.setdefault(desc.cg_mode, []).append(desc)

    def use(self, tables: Mapping[Role, GraphTable]) -> None:
        """Let batches be dispatched by tables; what is not there is left out."""
        for role, table in tables.items():
            held = {*self._full[role]}
            found = {key: [desc for desc in tried if desc in held] for key, tried in table.candidates.items()}
            # One assignment: no step sees half of it.
            self.managers[role]._candidates = {key: tried for key, tried in found.items() if tried}

    def drop(self, graphs: Iterable[Graph]) -> None:
        """Drop graphs to which no batch is dispatched; raises ``ValueError`` for another."""
        listed = list(graphs)
        for role, desc in listed:
            if any(desc in tried for tried in self.managers[role]._candidates.values()):
                raise ValueError(f"{role}: batches are dispatched to {desc}; use other tables first")
        for role, desc in listed:
            self._forget(role, [desc])
        self._list()

    def _forget(self, role: Role, graphs: Iterable[Any]) -> None:
        gone = [*graphs]
        for desc in gone:
            self.managers[role].graphs.pop(desc, None)
        sizes = {(desc.num_tokens, desc.num_active_loras) for desc in gone if desc.cg_mode.name == "PIECEWISE"}
        for piece in self._pieces.get(role, ()):
            table = piece.concrete_cudagraph_entries
            for key in [key for key in table if (key.num_tokens, key.num_active_loras) in sizes]:
                del table[key]
        self._full[role] = tuple(desc for desc in self._full[role] if desc not in gone)

    def change(self, tables: Mapping[Role, GraphTable]) -> None:
        """Go over to tables at once: add, dispatch, drop."""
        for _ in self.stepwise(tables, sys.maxsize):
            pass

    def stepwise(self, tables: Mapping[Role, GraphTable], together: int = 1, *, drops: bool = True) -> Iterator[None]:
        """Go over to tables by parts of ``together`` graphs; the caller runs steps between two of them.

        :param drops: False: keep what the tables do not have.
        """
        added = self.missing(tables)
        for first in range(0, len(added), together):
            self.add(added[first : first + together])
            yield
        self.use(tables)
        dropped = self.surplus(tables) if drops else []
        for first in range(0, len(dropped), together):
            self.drop(dropped[first : first + together])
            yield

    def anew(self, tables: Mapping[Role, GraphTable], pool: Any) -> None:
        """Capture all graphs of tables into an empty pool, then drop those of the old one, and with them that pool.

        After an error all is as it was.
        """
        held = [(owner, name, value) for owner, name, value in self._pools()]
        kept = {role: (manager.graphs, dict(manager._candidates)) for role, manager in self.managers.items()}
        entries = [(piece, piece.concrete_cudagraph_entries) for found in self._pieces.values() for piece in found]
        before, self._full = self._full, dict.fromkeys(self.managers, ())
        for manager in self.managers.values():
            manager.graphs, manager._candidates = {}, {}
        for piece, _ in entries:
            piece.concrete_cudagraph_entries = {}
        for owner, name, _ in held:
            setattr(owner, name, pool)
        try:
            self.add(self.missing(tables))
            self.use(tables)
        except BaseException:
            for owner, name, value in held:
                setattr(owner, name, value)
            for role, manager in self.managers.items():
                manager.graphs, manager._candidates = kept[role]
            for piece, table in entries:
                piece.concrete_cudagraph_entries = table
            self._full = before
            self._list()
            raise

    def _pools(self) -> Iterator[tuple[Any, str, Any]]:
        for manager in self.managers.values():
            yield manager, "pool", manager.pool
        for found in self._pieces.values():
            for piece in found:
                yield piece, "graph_pool", piece.graph_pool


@contextmanager
def _without_outputs(manager: Any) -> Iterator[None]:
    """Let a manager warm up PIECEWISE graphs without the buffers of what its full graphs return.

    A warm-up stores there what the model returned, and fails where they have fewer rows; no PIECEWISE graph reads them.
    """
    held = {name: getattr(manager, name) for name in OUTPUTS if hasattr(manager, name)}
    for name in held:
        setattr(manager, name, [] if name == "aux_hidden_states" else None)
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(manager, name, value)


class PieceWatch:
    """Remembers by capture which compiled pieces belong to which role."""

    def __init__(self) -> None:
        self.pieces: dict[Role, weakref.WeakSet[Any]] = {}

    def install(self, module: Any) -> None:
        """Wrap ``CudaGraphManager.capture`` of vLLM's module, before an engine is made."""
        original = module.CudaGraphManager.capture

        @functools.wraps(original)
        def capture(manager: Any, *args: Any, **kwargs: Any) -> Any:
            before = {id(piece): len(piece.concrete_cudagraph_entries) for piece in all_pieces()}
            result = original(manager, *args, **kwargs)
            grown = [
                piece for piece in all_pieces() if len(piece.concrete_cudagraph_entries) > before.get(id(piece), 0)
            ]
            self.pieces.setdefault(hooks.role_of(manager), weakref.WeakSet()).update(grown)
            return result

        module.CudaGraphManager.capture = capture


def all_pieces() -> list[Any]:
    """Return the wrappers of all compiled pieces of this process."""
    return [*getattr(getattr(sys.modules.get(WRAPPERS), "CUDAGraphWrapper", None), "_all_instances", ())]


def live_graphs(runner: Any, pieces: Mapping[Role, Collection[Any]]) -> LiveGraphs:
    """Return the graphs of a model runner that has captured; ``PieceWatch`` has its pieces."""
    speculator = runner.speculator
    managers = {Role.TARGET: runner.cudagraph_manager}
    for role, name in (
        (Role.DRAFT_PREFILL, "prefill_cudagraph_manager"),
        (Role.DRAFT_DECODE, "decode_cudagraph_manager"),
    ):
        if (manager := getattr(speculator, name, None)) is not None:
            managers[role] = manager
    return LiveGraphs(managers, functools.partial(_capture, runner), pieces)


def _capture(runner: Any, role: Role) -> None:
    """Capture what a role's manager lists, as ``GPUModelRunner.capture_model`` does, between two steps."""
    from vllm.v1.worker.workspace import use_workspace_lane

    with between_steps(runner):
        if role is not Role.TARGET:
            with use_workspace_lane(runner._draft_workspace_lane):
                runner.speculator.capture()
            return
        runner.cudagraph_manager.capture(
            runner.model, runner.model_state, runner.input_buffers, runner.intermediate_tensors, runner.block_tables,
            runner.attn_groups, runner.kv_cache_config, has_lora=runner.lora_config is not None,
            use_aux_hidden_state_outputs=runner.use_aux_hidden_state_outputs,
        )  # fmt: skip


GUARD = True
"""Whether warm-ups of fused drafts are kept from the slots of requests: the probe shows what happens without."""


@contextmanager
def between_steps(runner: Any) -> Iterator[None]:
    """Let a capture run while requests are held.

    - No garbage is collected, which could unload a kernel in the middle of a capture, and nothing is unfrozen:
      ``freeze_gc_for_cudagraph_capture`` would hand the engine's whole heap to the next collection.
    - The allocator keeps what it has cached: each graph would else give it back, and the next eager step take it anew.
    - The warm-up of fused draft decodes computes slots by the block table of the first request, and writes draft keys
      and values there; at start there is no request. It gets padding instead. The capture itself runs nothing.
    """
    import torch
    from vllm.config import set_current_vllm_config

    module: Any
    module, tables = sys.modules[MANAGERS], runner.block_tables
    original = type(tables).compute_slot_mappings

    def padded(idx_mapping: Any, starts: Any, positions: Any, num_tokens: int, out: Any = None) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return original(tables, idx_mapping, starts, positions, num_tokens, out)
        slots = tables.slot_mappings if out is None else out
        slots.fill_(PADDING_SLOT)
        return slots[:, :num_tokens]

    torch.cuda.synchronize()  # the thread that waits for a step's tokens may not ask the device during a capture
    collects, bar, empty = gc.isenabled(), module.tqdm, torch.cuda.empty_cache
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(set_current_vllm_config(runner.vllm_config))
        gc.disable()
        module.tqdm, torch.cuda.empty_cache = (lambda items, **_: items), lambda: None
        if GUARD:
            tables.compute_slot_mappings = padded
        try:
            yield
        finally:
            vars(tables).pop("compute_slot_mappings", None)
            module.tqdm, torch.cuda.empty_cache = bar, empty
            if collects:
                gc.enable()
