"""Outputs that come to the host later, and the timing of steps."""


class StepTimingCollector:
    """Is told when the forward starts."""

    def forward_start(self):
        pass


class AsyncOutput:
    """The tokens of a step."""

    def __init__(self, output):
        self.output = output

    def get_output(self):
        return self.output
