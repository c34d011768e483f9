"""Laws that the runner can break, and no backend."""

from capture_planner_conformance.failure import Law


class RunnerCheck(Law):
    """What the suite checks of the runner, in addition to what it checks of a backend."""

    DISPATCHED = "dispatched", "dispatch returns the cheapest compatible graph of all"
    CLASSIFIED = "classified", "a batch is dispatched by the lengths and prompts of what was scheduled"
    MADE = "made", "the runner computes the field values that the requests of a batch have"
    PLACED = (
        "placed",
        "each token's slot follows from its position and the pages of its request, and the keys from its last position",
    )
    DESCRIBED = (
        "described",
        "a backend is told the real extents of a batch, and inside a FULL graph those of its entry",
    )
    REPLAYED = (
        "replayed",
        "a batch that is dispatched to a graph replays the graph of that entry, once, after the capture session",
    )
    VERIFIED = (
        "verified",
        "while requests are served, proposed drafts are verified, those that are the next tokens are kept, and the "
        "drafter goes on from them",
    )
    COUNTED = "counted", "the session records every forward, with its graph or the reason it ran eager"
    AGREED = "agreed", "every rank decides the same from the gathered vector"
    TOGETHER = "together", "ranks capture the same graphs, or leave out the same, and an error of one is raised on all"
