"""``new-backend``: start an attention backend from the template."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
from pathlib import Path

import click

from capture_planner.cli.options import FILE
from capture_planner.errors import CapturePlannerError
from capture_planner.plugins import registry
from capture_planner.records._base import Name, constraints

# A wheel has the template inside the package; a checkout has it among the backends.
_PACKAGED = Path(__file__).parent.parent / "template"
_CHECKOUT = Path(__file__).parent.parent.parent / "backends" / "template"

# The template is a distribution that works as it is, under this name.
_DISTRIBUTION, _MODULE, _NAME = "capture-planner-my-attention", "my_attention", "my-attention"


@click.command(name="new-backend")
@click.argument("name")
@click.option(
    "--into", metavar="FOLDER", type=FILE, help="Folder to create. Default: capture-planner-NAME in the current folder."
)
def new_backend(name: str, into: Path | None) -> None:
    """Start an attention backend called NAME: a distribution that plans, runs and has tests.

    The folder must not exist. Install it, run its tests, and replace its parts one by one.
    """
    refuse_name(name)
    folder = into or Path(f"capture-planner-{slug(name).replace('_', '-')}")
    for path in write_template(name, folder):
        click.echo(f"written to {path}")
    click.echo(f"next: cd {shlex.quote(str(folder))} && python -m pip install --editable '.[test]' && pytest")


def slug(name: str) -> str:
    """Return the part of a module's name that a backend's name gives: ``Flash MLA/2`` is ``flash_mla_2``."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def module_of(name: str) -> str:
    """Return the module that a backend of this name gets."""
    return f"capture_planner_{slug(name)}"


def refuse_name(name: str) -> None:
    """Raise ``CapturePlannerError`` for a name that no spec can have, and for one that is taken."""
    for rule in constraints(Name):
        if (wrong := rule.problem(name)) is not None:
            raise CapturePlannerError(f"the name of a backend {wrong}")
    installed = registry.load_backends()
    for other in installed:
        if slug(other) == slug(name):
            shared = "" if other == name else f", and both are the module {module_of(name)}"
            reason = f"a backend named {other!r} is installed, from {installed[other].distribution}{shared}"
            raise CapturePlannerError(f"{reason}; choose another name")
    # An installed module of that name would hide the new one, or be hidden by it.
    if importlib.util.find_spec(module_of(name)) is not None:
        reason = f"the module {module_of(name)} is installed, and a backend named {name!r} would be that module too"
        raise CapturePlannerError(f"{reason}; choose another name")


def template_files() -> dict[str, str]:
    """Return the text of each file of the template, by its path in it."""
    folder = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
    files = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    # Not what tools leave behind after work in the template.
    return {
        name.as_posix(): path.read_text("utf-8")
        for name, path in files.items()
        if not any(part.startswith(".") or part == "__pycache__" for part in name.parts)
    }


def write_template(name: str, folder: Path) -> list[Path]:
    """Write the template under a backend's name into a new folder; returns the files.

    Raises ``CapturePlannerError`` where the folder exists or cannot be created. Nothing is left of it then.
    """
    named = {_DISTRIBUTION: f"capture-planner-{slug(name).replace('_', '-')}", _MODULE: slug(name), _NAME: name}

    def renamed(text: str) -> str:
        # In one pass, so that no replacement is replaced again.
        return re.sub("|".join(named), lambda match: named[match[0]], text)

    try:
        folder.mkdir()
    except FileExistsError:
        raise CapturePlannerError(
            f"{folder} already exists, and is not overwritten; name another folder with --into"
        ) from None
    except OSError as error:
        raise CapturePlannerError(f"{folder} cannot be created: {error.strerror or error}") from error
    written = []
    try:
        for file, text in template_files().items():
            path = folder / renamed(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(renamed(text), "utf-8", newline="\n")
            written.append(path)
    except OSError as error:
        # Half a distribution would block the next try.
        shutil.rmtree(folder)
        raise CapturePlannerError(f"{folder} cannot be written: {error.strerror or error}") from error
    return written
