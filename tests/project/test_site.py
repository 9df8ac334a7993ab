"""What the site and the other pages name: pages, headings, files, functions, commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gradreduce.cli.app import command
from gradreduce.device import Device

pytestmark = pytest.mark.repo
ROOT = Path(__file__).resolve().parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    *SITE,
    *sorted(ROOT.glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("bench", "examples", "src/gradreduce/device")),
]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def tables_of_contents() -> dict[str, list[Path]]:
    """The pages in the tables of contents of the site, by their captions."""
    found: dict[str, list[Path]] = {}
    for page in SITE:
        for options, names in re.findall(r"```{toctree}\n((?::.*\n)*)([^`]*)```", text_of(page)):
            caption = re.search(r":caption: (.*)", options)
            found.setdefault(caption[1] if caption else page.name, []).extend(
                page.parent / f"{name}.md"
                for name in re.findall(r"^(?:.*<)?(\S+?)>?$", names, re.MULTILINE)
            )
    return found


def test_every_page_is_in_a_table_of_contents():
    listed = [page for pages in tables_of_contents().values() for page in pages]
    assert sorted([*listed, ROOT / "docs/index.md"]) == SITE


# --- links and names of files ---------------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


def test_every_link_and_every_name_of_a_file_leads_to_it():
    folders = "src|examples|bench|kernels|docs|tests|tools"
    for page in PAGES:
        text = text_of(page)
        for name in re.findall(rf"`((?:{folders})/[\w/.]+\.\w+)`", text):
            assert (ROOT / name).is_file(), (page.name, name)
        for target in re.findall(r"\]\((?!https://)([^)]+)\)", re.sub(r"`[^`]*`", "", text)):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), (page.name, target)
            assert not anchor or anchor in anchors_of(file), (page.name, target)


# --- diagrams -------------------------------------------------------------------------------------


def diagram_lines() -> list[tuple[str, str]]:
    """Names and the file that has them, of each line of a diagram."""
    blocks = re.findall(r"```text\n(.*?)```", text_of(ROOT / "docs/architecture.md"), re.DOTALL)
    lines = [line for block in blocks[1:] for line in block.splitlines()]
    return re.findall(r"^[│├└ ]*(\w[\w., ]*?) {2,}([\w/]+\.py)", "\n".join(lines), re.MULTILINE)


def test_functions_of_the_diagrams_are_in_their_files():
    lines = diagram_lines()
    assert len(lines) > 30
    for names, file in lines:
        source = text_of(ROOT / "src/gradreduce" / file)
        for name in re.findall(r"\w+", names):
            assert re.search(rf"(def|class) {name}\b", source), (name, file)


def test_the_tree_has_every_package():
    (tree, *_) = re.findall(r"```text\n(.*?)```", text_of(ROOT / "docs/architecture.md"), re.DOTALL)
    package = ROOT / "src/gradreduce"
    folders = {path.parent.relative_to(package) for path in package.rglob("*.py")}
    named = {folder.as_posix() for folder in folders} - {"."}
    assert named == set(re.findall(r"^  .*?((?:\w+/)*\w+)/ ", tree, re.MULTILINE))


def test_the_backend_interface_has_every_abstract_method():
    _, _, section = text_of(ROOT / "docs/architecture.md").partition("## The backend interface")
    rows = re.findall(r"^\| .* \|$", section.partition("\n## ")[0], re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", "".join(rows)))
    assert named == Device.__abstractmethods__


# --- commands -------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[Path, str]]:
    """Each line of a code block that is indented or of a shell, and each command in a text."""
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", text_of(page))
        for block in re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL):
            yield from ((page, line.removeprefix("$ ")) for line in block.splitlines())
        outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        yield from ((page, line) for line in re.findall(r"^ {4,}(\S.*)$", outside, re.MULTILINE))
        yield from ((page, line) for line in re.findall(r"`([^`\n]+)`", outside))


def test_programs_of_commands_exist_and_have_their_options():
    count = 0
    for page, line in commands():
        words = line.partition(" #")[0].split()
        for index, word in enumerate(words):
            if not re.fullmatch(r"(examples|bench|tools)/\w+\.(py|sh)", word):
                continue
            program, count = ROOT / word, count + 1
            assert program.is_file(), (page.name, line)
            sources = "".join(map(text_of, program.parent.rglob("*.py")))
            for option in re.findall(r"--[a-z][\w-]*", " ".join(words[index + 1 :])):
                assert f'"{option}"' in sources, (page.name, line)
    assert count > 20


def test_commands_of_gradreduce_have_their_options():
    count = 0
    for page, line in commands():
        if not re.match(r"gradreduce [a-z]", line):
            continue
        found: click.Command = command
        for word in shlex.split(line)[1:]:
            if isinstance(found, click.Group):
                assert word in found.commands, (page.name, line)
                found, count = found.commands[word], count + 1
            elif word.startswith("--"):
                options = {option for each in found.params for option in each.opts}
                assert word in options | {"--help"}, (page.name, line)
    assert count > 10
