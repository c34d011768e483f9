"""Configuration of the documentation site: Sphinx, MyST and furo."""

from __future__ import annotations

import inspect
from typing import Any

from sphinx.application import Sphinx

import capture_planner
from capture_planner import codec, dispatch, errors, modes
from capture_planner.plugins import registry

HOMES = {"reference/api/capture_planner": (codec, registry, dispatch, errors, modes)}
"""Of each page, the packages whose classes its modules export too, and which have pages or sections of their own."""

RECORDS = "capture_planner.records."

project = "capture-planner"
author = "capture-planner contributors"
version = release = capture_planner.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "sphinx_copybutton"]
exclude_patterns = ["_build"]
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
smartquotes_action = "qe"  # Quotes and ellipses; help texts have options such as --environment.

# Every page of the API reference is one automodule: the package's ``__all__`` is the list of names.
autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_show_copyright = False
html_title = f"capture-planner {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]


def skip_member(app: Sphinx, kind: str, name: str, value: Any, _skip: bool, _options: Any) -> bool | None:
    """Leave out what attrs adds to a class; document a class in one place, with its own package."""
    if name in ("__attrs_attrs__", "__match_args__"):
        return True
    page = app.env.docname
    elsewhere = any(value is getattr(package, name, None) for package in HOMES.get(page, ()))
    if page == "reference/api/records":  # helpers next to the records are private
        elsewhere = not inspect.isclass(value)
    elif inspect.isclass(value):
        elsewhere = elsewhere or value.__module__.startswith(RECORDS)
    else:
        elsewhere = False
    return True if kind == "module" and elsewhere else None


def setup(app: Sphinx) -> None:
    """Register the event handlers of this file."""
    app.connect("autodoc-skip-member", skip_member)
