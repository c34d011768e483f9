"""What comes back from a step."""

from dataclasses import dataclass


@dataclass
class ModelRunnerOutput:
    """The tokens of each request."""

    req_ids: list
    sampled_token_ids: list
