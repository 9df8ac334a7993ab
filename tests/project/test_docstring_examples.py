"""Every public class and function has an example in its docstring, and the examples run.

An example is a doctest in a section ``Example:``. ``np`` (NumPy) and ``gr`` (gradreduce) are
imported for it. What needs PyTorch, JAX, Ray or several processes has a line that names a tested
file instead: ``Example: see ``examples/train_jax.py``.`` or a page of ``docs/``.
"""

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import golden_files

import gradreduce as gr

pytestmark = pytest.mark.repo
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(gr.__file__).parent
LIBRARIES = ("torch", "jax", "ray")  # their packages cannot be imported everywhere: read, not run
POINTER = re.compile(r"^ *Example: see ``([\w/]+\.(?:py|md))``", re.MULTILINE)

# Methods that users call for themselves: each has an example of its own. The other methods are
# shown by the example of their class.
METHODS = """
    AGNCenter.start_worker AGNOptimizer.make_session_run_hook AllReduceCrossDeviceOps.all_gather
    AllReduceCrossDeviceOps.all_reduce AllReduceCrossDeviceOps.capture AllReduceCrossDeviceOps.plan
    AllReduceCrossDeviceOps.prepare AllReduceCrossDeviceOps.profile
    AllReduceCrossDeviceOps.reduce_scatter ConditionalAccumulatorBase.state_dict
    CrossDeviceOps.batch_reduce CrossDeviceOps.broadcast CrossDeviceOps.reduce
    IndexedSlices.coalesce IndexedSlices.to_dense Mesh.flat_buffer Mesh.flight_record Mesh.journal
    Mesh.reset Mesh.trace Optimizer.apply_gradients Optimizer.compute_gradients Optimizer.minimize
    Optimizer.prepare Optimizer.state_dict SyncStep.state_dict Variable.array Variable.assign
""".split()

# ---- finding examples ----------------------------------------------------------------------------


def documented(path: Path) -> Iterator[tuple[str, str]]:
    """The docstrings of a file with the names of their owners: class, function, class.method."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.ClassDef | ast.FunctionDef):
                if text := ast.get_docstring(each):
                    yield prefix + each.name, text
                yield from walk(each, f"{prefix}{each.name}.")

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), "")


def library_docstrings(library: str) -> dict[str, str]:
    """Those of ``gr.torch``, ``gr.jax`` or ``gr.ray``, which may be a folder."""
    files = [*PACKAGE.glob(f"{library}.py"), *PACKAGE.glob(f"{library}/*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    (names,) = re.findall(r"__all__ = (\[[^]]*\])", "".join(texts))
    public = ast.literal_eval(names)
    found = [pair for path in files for pair in documented(path)]
    return {f"{library}.{name}": text for name, text in found if name in public}


def public_docstrings() -> dict[str, str]:
    """The docstrings that need an example, by public name."""
    objects = dict(golden_files.public_objects())
    found = {name: objects[name].__doc__ or "" for name, _ in golden_files.public_names()}
    found.update({name: objects[name].__doc__ or "" for name in METHODS})
    for library in LIBRARIES:
        found.update(library_docstrings(library))
    return found


# ---- checking examples ---------------------------------------------------------------------------


def is_run(name: str) -> bool:
    """Whether a test runs this file: an example that a test names, or a page with Python blocks."""
    path = ROOT / name
    if not path.is_file():
        return False
    if path.suffix == ".md":  # test_readme.py runs the blocks of these pages
        return path.parent == ROOT / "docs" and "```python\n" in path.read_text(encoding="utf-8")
    used = re.compile(
        rf'"{path.stem}\.py"|import_module\("{path.stem}"\)|^import {path.stem}$', re.M
    )
    tests = (ROOT / "tests").rglob("test_*.py")
    return any(used.search(test.read_text(encoding="utf-8")) for test in tests)


def fault(docstring: str) -> str:
    """What is wrong with the example of a docstring; empty if nothing is."""
    pointers = POINTER.findall(docstring)
    if not pointers and ">>> " not in docstring:
        return "has no example"
    if ">>> " in docstring and "Example:\n" not in docstring:
        return "has a doctest outside of a section 'Example:'"
    return next((f"names {name}, which no test runs" for name in pointers if not is_run(name)), "")


def failures(docstring: str) -> str:
    """Runs the doctest of a docstring; returns what the doctest module says about failures."""
    test = doctest.DocTestParser().get_doctest(
        docstring, {"np": np, "gr": gr}, "example", None, None
    )
    lines: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=lines.append)
    return "".join(lines)


DOCTESTS = {
    f"{path.relative_to(PACKAGE).as_posix()}:{name}": text
    for path in sorted(PACKAGE.rglob("*.py"))
    for name, text in documented(path)
    if ">>> " in text
}


@pytest.mark.whole_product
@pytest.mark.parametrize("name", DOCTESTS)
def test_examples_print_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    assert not failures(DOCTESTS[name])


def test_every_public_name_has_an_example_that_a_test_runs():
    faults = {name: wrong for name, text in public_docstrings().items() if (wrong := fault(text))}
    assert faults == {}


def test_faults_of_examples_are_found():
    assert failures("Example:\n    >>> gr.ReduceOp.SUM.name\n    'MEAN'\n")
    assert failures("Example:\n    >>> gr.no_such_name\n")
    assert not failures("Example:\n    >>> gr.ReduceOp.SUM.name\n    'SUM'\n")
    assert fault("Adds.") == "has no example"
    assert fault("Adds.\n\n>>> 1\n1\n") == "has a doctest outside of a section 'Example:'"
    for name in ("examples/no_such.py", "examples/agn_ray.py", "docs/no_such.md"):
        assert fault(f"Adds.\n\nExample: see ``{name}``.\n") == f"names {name}, which no test runs"
    for name in ("examples/train_jax.py", "examples/agn_workers.py", "docs/ray.md"):
        assert not fault(f"Adds.\n\nExample: see ``{name}``.\n")
