"""The options that commands share, and the values that options take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from capture_planner import codec
from capture_planner.codec import hub
from capture_planner.errors import InvalidValue

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path)
POSITIVE = click.IntRange(1)


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """Declare an option whose default, where it has one, is shown in the help."""
    settings.setdefault("show_default", settings.get("default") is not None)
    return click.option(*names, **settings)


def flag(name: str, text: str) -> Callable[[F], F]:
    """Declare a switch that is off by default."""
    return click.option(name, is_flag=True, help=text)


def formats(*formats: str) -> Callable[[F], F]:
    """Declare ``--format``: text or JSON, or the given formats, the first one by default."""
    choices = formats or ("text", "json")
    return option("--format", "form", type=click.Choice(choices), default=choices[0], help="Output format.")


environment = click.option(
    "-e",
    "--environment",
    metavar="NAME|FILE",
    help="Machine to plan for: a shipped environment or an environment file.",
)
model = click.option(
    "--model",
    type=FILE,
    help="Folder or config.json of a Hugging Face causal model; without weights, they are random. "
    "Default: a Llama of the plan's dimensions with random weights.",
)


def _fetch(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        context.with_resource(hub.fetching())


download = click.option(
    "--download",
    is_flag=True,
    expose_value=False,
    callback=_fetch,
    help="Fetch the config.json of a model that is neither here nor in Hugging Face's cache; never its weights.",
)
seed = option("--seed", type=click.IntRange(0, (1 << 62) - 1), default=0, help="Random seed.")
threads = option(
    "--threads", type=click.IntRange(1, 256), default=1, help="CPU threads per operator; changes how sums are rounded."
)
compiling = click.option(
    "--compile/--no-compile", default=None, help="Compile the layers, once for all sizes. Default: on a GPU only."
)
progress = click.option(
    "--progress/--no-progress", default=None, help="Show progress bars. Default: on a terminal only."
)
batches = click.option(
    "--batches", type=click.File("rb"), help="Answer each batch of a JSON-lines file; - reads stdin."
)


def page_size(default: int | None, text: str = "") -> Callable[[F], F]:
    return option("--page-size", type=click.IntRange(1, 1024), default=default, help=f"Tokens per KV-cache page.{text}")


def pages(default: str) -> Callable[[F], F]:
    return click.option("--pages", type=POSITIVE, help=f"Number of KV-cache pages. Default: {default}.")


def admit(verb: str) -> Callable[[F], F]:
    """Declare the options that admit a plan that is refused without them; ``verb``: of the command."""

    def with_both(command: F) -> F:
        errors = flag("--any-plan", f"{verb} the plan even if lint finds errors.")
        other = flag("--any-environment", f"{verb} the plan even if it is for another machine.")
        return errors(other(command))

    return with_both


def stated(name: str) -> bool:
    """Say whether an option was given on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def dashed(name: str) -> str:
    """Return an option as it is written: ``--page-size``."""
    return f"--{name.replace('_', '-')}"


class ParsedText(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A value that a function reads from text; it raises ``ValueError`` or ``InvalidValue`` with the message."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value; a default may have been read already."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except (ValueError, InvalidValue) as error:
            self.fail(str(error), param, ctx)


def whole_numbers(text: str, parts: Iterable[str], otherwise: str) -> tuple[int, ...]:
    """Return the parts of a text as numbers; raises ``ValueError`` with what the text is ``otherwise``."""
    try:
        return tuple(map(int, parts))
    except ValueError:
        raise ValueError(f"{text!r} is not {otherwise}.") from None


def _numbers(text: str) -> tuple[int, ...]:
    numbers = whole_numbers(text, text.split(","), "a comma-separated list of whole numbers")
    if min(numbers) < 1 or max(numbers) > 1 << 20:
        raise ValueError(f"{text!r}: each number must be from 1 to {1 << 20}.")
    return tuple(sorted(set(numbers)))


def _range(text: str) -> tuple[int, ...]:
    low, colon, high = text.partition(":")
    ends = whole_numbers(text, (low, high if colon else low), "a whole number or LOW:HIGH")
    if not 1 <= ends[0] <= ends[1]:
        raise ValueError(f"{text!r}: LOW must be at least 1 and at most HIGH.")
    return ends


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(map(float, text.split(",")))
    except ValueError:
        shares = (math.nan,)
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"{text!r} is not a comma-separated list of numbers from 0 to 1.")
    return shares


NUMBERS = ParsedText("N,...", _numbers)
"""Comma-separated whole numbers of at least 1: each once, in ascending order."""

RANGE = ParsedText("N|LOW:HIGH", _range)
"""Two bounds, whole numbers of at least 1."""

SHARES = ParsedText("P0,P1,...", _shares)
"""Comma-separated numbers from 0 to 1."""

SIZE = ParsedText("SIZE", codec.parse_bytes)
"""A number of bytes, such as ``512MiB``."""

proposals = click.option(
    "--proposals",
    type=SHARES,
    help="Synthetic draft lengths, by --seed: the share of steps in which the drafter proposes drafts 0 to i, for each "
    "i; what it makes beyond is not verified. Default: all.",
)
acceptance = click.option(
    "--acceptance",
    type=SHARES,
    help="Synthetic acceptance, by --seed and whatever the target says: the share of steps in which drafts 0 to i are "
    "all accepted, for each i, as vLLM's synthetic_acceptance_rates. The tokens are then not the model's.",
)
