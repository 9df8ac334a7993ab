"""Settings of the documentation site; CONTRIBUTING.md has the command that builds it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.ext.autodoc.mock import mock
from sphinx.util import logging

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "src"))

import gradreduce  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "gradreduce"
version = release = gradreduce.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nitpicky = True
html_theme = "furo"
html_title = f"gradreduce {release}"
html_copy_source = False
html_show_copyright = False

# --- pages ----------------------------------------------------------------------------------------

myst_heading_anchors = 3  # anchors of headings, named as Git hosts name them


def included_files() -> dict[Path, Path]:
    """Files of the repository that a page includes, each with its page."""
    return {
        (page.parent / name).resolve(): page
        for page in DOCS.rglob("*.md")
        for name in re.findall(r"^```\{include\} (\S+)", page.read_text("utf-8"), re.MULTILINE)
    }


def rewrite_links(text: str, file: Path, page: Path) -> str:
    """Makes the relative links of a Markdown file work in the site, in the page that shows it.

    A file outside ``docs`` becomes the page that includes it, if there is one, else a download.
    """
    pages = included_files()

    def rewritten(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        target = (file.parent / path).resolve()
        if target.is_dir():
            target /= "README.md"
        if not target.is_file():
            return match[0]
        target = pages.get(target, target)
        scheme = "" if target.is_relative_to(DOCS) else "path:"
        return f"]({scheme}{os.path.relpath(target, page.parent)}{anchor})"

    return re.sub(r"\]\(([^)#:]+)(#[^)]*)?\)", rewritten, text)


def on_source_read(app: Sphinx, name: str, source: list[str]) -> None:
    """Rewrites the links of a page."""
    page = Path(app.env.doc2path(name))
    source[0] = rewrite_links(source[0], page, page)


def on_include_read(app: Sphinx, path: Path, name: str, source: list[str]) -> None:
    """Rewrites the links of a file that a page includes."""
    file = (DOCS / path).resolve()
    source[0] = rewrite_links(source[0], file, included_files()[file])


# --- docstrings -----------------------------------------------------------------------------------

autodoc_mock_imports = ["cupy", "jax", "ray", "torch"]
autodoc_default_options = {
    "members": True,
    # Inherited members too, but for those of these bases: they have entries of their own.
    "inherited-members": "BaseException, ConditionalAccumulatorBase, CrossDeviceOps, Enum, IntEnum,"
    " Optimizer, int, object, tuple",
    "special-members": "__call__",
}
autodoc_member_order = "bysource"
autodoc_typehints = "none"
# Names of other libraries.
nitpick_ignore_regex = [("py:(class|exc)", r"(?!gradreduce\.)\w+\..*")]
napoleon_numpy_docstring = False

COLON = "\ue000"  # a character that no docstring has


def hide_colons(app: Sphinx, what: str, name: str, obj: Any, options: Any, text: list[str]) -> None:
    """Hides colons that napoleon would take for the end of a type: ours are in sentences."""
    first = 0 if what in ("attribute", "property") else None
    for number, line in enumerate(text):
        if number == first or (number and text[number - 1] == "Returns:"):
            text[number] = line.replace(":", COLON)


def show_colons(app: Sphinx, what: str, name: str, obj: Any, options: Any, text: list[str]) -> None:
    """Shows them again, behind napoleon."""
    text[:] = [line.replace(COLON, ":") for line in text]


def public_names() -> Iterator[str]:
    """Every name that the reference must have."""
    for line in (ROOT / "tests/data/public_api.txt").read_text("utf-8").splitlines():
        yield line.removeprefix("class ").partition("(")[0]
    for module in ("torch", "jax", "ray"):
        with mock(autodoc_mock_imports):
            names = import_module(f"gradreduce.{module}").__all__
        yield from (f"{module}.{name}" for name in names)


def check_reference(app: Sphinx, env: BuildEnvironment) -> None:
    """Warns of public names that the reference does not have."""
    documented = env.domains.python_domain.objects
    missing = [name for name in public_names() if f"gradreduce.{name}" not in documented]
    if missing:
        logging.getLogger(__name__).warning("docs/api/*.md has no %s", ", ".join(missing))


def setup(app: Sphinx) -> None:
    """Connects the functions of this file."""
    app.connect("autodoc-process-docstring", hide_colons, priority=400)
    app.connect("autodoc-process-docstring", show_colons, priority=600)
    app.connect("env-check-consistency", check_reference)
    app.connect("source-read", on_source_read)
    app.connect("include-read", on_include_read)
