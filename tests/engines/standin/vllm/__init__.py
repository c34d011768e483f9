"""What replaces vLLM 0.33 in tests: the modules of model runner V2 that are observed, without torch.

The functions that capture-planner wraps have vLLM's parameters, which the oracle compares with the wheel's, and call
each other as vLLM's do.
"""

__version__ = "0.33.0"
