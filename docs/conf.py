"""Settings of the documentation site; CONTRIBUTING.md has the command that builds it."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.ext.autodoc.mock import mock
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "src"))

import gradreduce  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "gradreduce"
version = release = gradreduce.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
copybutton_exclude = ".linenos, .gp, .go"  # neither prompts nor what a command prints
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*"), ("py:exc", ".*")]  # types, many of other libraries
html_theme = "furo"
html_title = f"gradreduce {release}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 90

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

    A file outside ``docs`` becomes the page that includes it, if there is one, else a download. A
    link whose text is the name of a page shows the title of the page or section instead.
    """
    pages = included_files()

    def rewritten(match: re.Match[str]) -> str:
        name, path, anchor = match[1] or "", match[2], match[3] or ""
        target = (file.parent / path).resolve()
        if target.is_dir():
            target /= "README.md"
        if not target.is_file():
            return match[0]
        target = pages.get(target, target)
        relative = os.path.relpath(target, page.parent)
        if target.is_relative_to(DOCS):
            return f"{name and '['}]({relative}{anchor})"
        return f"{name}](path:{relative}{anchor})"

    return re.sub(r"(\[[\w/.]+\.md)?\]\(([^)#:]+)(#[^)]*)?\)", rewritten, text)


def on_source_read(app: Sphinx, name: str, source: list[str]) -> None:
    """Rewrites the links of a page."""
    page = Path(app.env.doc2path(name))
    source[0] = rewrite_links(source[0], page, page)


def on_include_read(app: Sphinx, path: Path, name: str, source: list[str]) -> None:
    """Rewrites the links of a file that a page includes."""
    file = (DOCS / path).resolve()
    source[0] = rewrite_links(source[0], file, included_files()[file])


def link_names(app: Sphinx, document: nodes.document, page: str) -> None:
    """Links names in texts to the reference: `gr.open_mesh(2)`, `Mesh` and `Mesh.reset`."""
    known, entries = app.env.domains.python_domain.objects, entries_by_origin(app.env)
    for text in list(document.findall(nodes.literal)):
        named = re.fullmatch(r"(?:gr\.(?=\w)|(?=[A-Z]))([\w.]+)(?:\(.*\))?", text.astext())
        name = f"gradreduce.{named[1]}" if named else ""
        if name not in known and "." in name:
            name = entries.get(origin_of(name), [""])[0]
        target = known.get(name)
        if target is None or isinstance(text.parent, nodes.reference):
            continue
        copy = text.deepcopy()
        link = make_refnode(app.builder, page, target.docname, target.node_id, copy)
        text.parent.replace(text, link)


# --- docstrings -----------------------------------------------------------------------------------

autodoc_mock_imports = ["cupy", "jax", "ray", "torch"]
autodoc_default_options = {
    "members": True,
    # Inherited members too, but for those of these bases: they have entries of their own.
    "inherited-members": "AdamOptimizer, AllReduceCrossDeviceOps, BaseException,"
    " CenterRule, ConditionalAccumulator, ConditionalAccumulatorBase, CrossDeviceOps,"
    " DistributedValues, Enum, IntEnum, NestedCalls, Optimizer, OptimizerState, PreparedStep,"
    " SharedAccumulator, SharedObject, _MockObject, int, object, tuple",
    "special-members": "__call__",
}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # see types_of; signatures stay short
napoleon_numpy_docstring = False

COLON = "\ue000"  # a character that no docstring has


def types_of(function: Any) -> dict[str, str]:
    """The types of a function's parameters, as its source has them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    types = {each.name: each.annotation for each in parameters if each.annotation is not each.empty}
    return {
        name: kind if isinstance(kind, str) else inspect.formatannotation(kind)
        for name, kind in types.items()
    }


def signature_of_mocked(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str, result: str
) -> tuple[str, str] | None:
    """Returns the signature of a class whose base is mocked, which hides it from autodoc."""
    if what != "class" or arguments != "(*args, **kwargs)":
        return None
    found = inspect.signature(obj)
    plain = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=found.empty)), result


def before_napoleon(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, text: list[str]
) -> None:
    """Adds types to "Args"; hides colons that napoleon would take for the end of a type."""
    types = types_of(obj)
    section = ""
    for number, line in enumerate(text):
        if line.endswith(":") and line[:1].isupper():
            section = line
        elif section == "Args:" and (found := re.match(r"    ([\w, *]+): ", line)):
            of_names = {types.get(each.strip(" *"), "") for each in found[1].split(",")}
            if len(of_names) == 1 and (only := of_names.pop()):
                text[number] = f"    {found[1]} ({only}): {line[found.end() :]}"
        elif text[number - 1] == "Returns:" or (number == 0 and what in ("attribute", "property")):
            text[number] = line.replace(":", COLON)


def after_napoleon(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, text: list[str]
) -> None:
    """Shows the colons again."""
    text[:] = [line.replace(COLON, ":") for line in text]


# --- entries of the reference ---------------------------------------------------------------------

Origin = tuple[str, str]  # a class, and the name of a member that its body defines


def class_of(name: str) -> type | None:
    """The class that has a name, such as ``gradreduce.ray.AGNCenter``."""
    module, found = name, None
    while module and module not in sys.modules:
        module = module.rpartition(".")[0]
    found = sys.modules.get(module)
    with mock(autodoc_mock_imports):  # a build that reads only some pages has not imported all
        for each in name.removeprefix(module).split(".")[1:]:
            found = getattr(found, each, None)
    return found if isinstance(found, type) else None


def origin_of(name: str) -> Origin | None:
    """The class that defines a member, and the member; None if it is no member of a class."""
    owner, _, member = name.rpartition(".")
    for base in getattr(class_of(owner), "__mro__", ()):
        if member in vars(base):
            return f"{base.__module__}.{base.__qualname__}", member
    return None


def entries_by_origin(env: BuildEnvironment) -> dict[Origin | None, list[str]]:
    """The entries of each member of a class: one, or several if subclasses list it again."""
    found: dict[Origin | None, list[str]] = {}
    for name in env.domains.python_domain.objects:
        found.setdefault(origin_of(name), []).append(name)
    found.pop(None, None)
    return found


def module_of_source(app: Sphinx, module: str, name: str) -> str | None:
    """The module that defines a member, also a property, which does not know its module."""
    owner = class_of(f"{module}.{name}".rpartition(".")[0])
    for base in getattr(owner, "__mro__", ()):
        if name.rpartition(".")[2] in vars(base):
            return base.__module__
    return None


def public_names() -> Iterator[str]:
    """Every name that the reference must have."""
    for line in (ROOT / "tests/data/public_api.txt").read_text("utf-8").splitlines():
        yield line.removeprefix("class ").partition("(")[0]
    for module in ("torch", "jax", "ray"):
        with mock(autodoc_mock_imports):
            names = import_module(f"gradreduce.{module}").__all__
        yield from (f"{module}.{name}" for name in names)


def check_reference(app: Sphinx, env: BuildEnvironment) -> None:
    """Warns of public names that the reference does not have, or has twice."""
    # First, because it imports the modules: the second build of a site has read no page with them.
    names = [f"gradreduce.{name}" for name in public_names()]
    logger, entries = logging.getLogger(__name__), entries_by_origin(env)
    documented = env.domains.python_domain.objects
    missing = [name for name in names if name not in documented and origin_of(name) not in entries]
    if missing:
        logger.warning("docs/api/*.md has no %s", ", ".join(missing))
    for (_, member), of_member in entries.items():
        if len(of_member) > 1:
            logger.warning("docs/api/*.md lists %s more than once: %s", member, of_member)


def setup(app: Sphinx) -> None:
    """Connects the functions of this file."""
    app.connect("autodoc-process-signature", signature_of_mocked)
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", after_napoleon, priority=600)
    app.connect("doctree-resolved", link_names)
    app.connect("env-check-consistency", check_reference)
    app.connect("viewcode-follow-imported", module_of_source)
    app.connect("source-read", on_source_read)
    app.connect("include-read", on_include_read)
