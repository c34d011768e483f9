"""The wrapper of a compiled piece: it captures a graph for each size that it meets, and replays it from then on."""

import weakref
from typing import ClassVar

from vllm.compilation.counter import compilation_counter


class Graph:
    """A captured graph, which takes a MiB for each token as long as something refers to it."""

    live: ClassVar = weakref.WeakSet()

    def __init__(self, num_tokens, pool):
        self.num_tokens, self.pool = num_tokens, pool
        Graph.live.add(self)
        compilation_counter.num_cudagraph_captured += 1


class CUDAGraphWrapper:
    """Has an entry for each size."""

    _all_instances: ClassVar = weakref.WeakSet()

    def __init__(self, pool):
        self.graph_pool = pool
        self.concrete_cudagraph_entries = {}
        CUDAGraphWrapper._all_instances.add(self)

    def __call__(self, num_tokens):
        if num_tokens not in self.concrete_cudagraph_entries:
            self.concrete_cudagraph_entries[num_tokens] = Graph(num_tokens, self.graph_pool)
