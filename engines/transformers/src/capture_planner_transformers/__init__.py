"""transformers' continuous batching under a plan: ``apply(model, plan)``, then serve as before.

There is no emulation and so no engine to register: transformers captures a graph when a batch first needs one, so what
it captures depends on its requests and on free memory, and it has no command line that would say.
"""

from capture_planner_transformers.apply import Application, apply

__all__ = ["Application", "apply"]
