"""Bring README.md and the pages in docs up to date.

``python tools/docs/generate.py`` rewrites what is generated: the text between ``<!-- generated: NAME -->``
and ``<!-- end -->`` (see ``parts``), and the output of the examples (see ``examples``). With ``--check`` it
changes nothing, prints the differences, and exits with 1 if there are any. Arguments name single pages.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import tempfile
from pathlib import Path

from examples import BLOCK, ROOT, Workspace
from parts import PARTS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_PART = re.compile(r"(?P<open><!-- generated: (?P<name>[\w-]+) -->\n).*?(?P<close><!-- end -->)", re.S)


def render(page: Path) -> str:
    """Return a page as it should be."""
    text = _PART.sub(lambda m: f"{m['open']}\n{PARTS[m['name']]()}\n\n{m['close']}", page.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        # Resolved, as modules of a page are told by comparing paths.
        workspace = Workspace(Path(folder).resolve())
        return BLOCK.sub(lambda match: workspace.render(match, page), text)


def main() -> None:
    """Write the pages, or with ``--check`` compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Change nothing; exit with 1 if a page is stale.")
    parser.add_argument("pages", nargs="*", type=Path, help="Pages to render. Default: all.")
    options = parser.parse_args()
    stale = []
    for page in [path.resolve() for path in options.pages] or PAGES:
        before, after = page.read_text("utf-8"), render(page)
        if before == after:
            continue
        stale.append(page.relative_to(ROOT))
        if options.check:
            old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
            sys.stdout.writelines(difflib.unified_diff(old, new, str(page), "up to date", n=1))
        else:
            page.write_text(after, "utf-8")
    state = "out of date" if options.check else "written"
    sys.stdout.write(f"{state}: {', '.join(map(str, stale)) or 'none'}\n")
    sys.exit(bool(options.check and stale))


if __name__ == "__main__":
    main()
