"""Which entry serves a batch, in constant time. Needs records alone, so that an engine can vendor it."""

from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher

__all__ = ["Dispatch", "Dispatcher"]
