"""Requests: generated, read from a trace of lengths or from prompts, and admitted or refused.

Whatever the source, requests come in the order of arrival, and a seed gives the same requests each
time (with the same numpy: what its distributions draw may change between versions). No torch here;
a tokenizer is imported when prompts are read, and not before.
"""

from capture_planner_runner.serving.workload.prompts import Decode, from_prompts
from capture_planner_runner.serving.workload.request import Request, admit
from capture_planner_runner.serving.workload.synthetic import from_trace, generated, with_adapters

__all__ = ["Decode", "Request", "admit", "from_prompts", "from_trace", "generated", "with_adapters"]
