"""The program whose types the lints check runs, and its results have these types."""

from __future__ import annotations

import ast
import runpy
import sys
import types
import typing
from typing import Any, get_args, get_origin

import numpy as np
import pytest
from support.background_runs import ROOT

pytestmark = pytest.mark.repo
PROGRAM = ROOT / "tests" / "user_types" / "user_script.py"
# Replaces PyTorch, which may not be installed; its arrays are NumPy's.
WITHOUT_PYTORCH = types.SimpleNamespace(Tensor=np.ndarray, ones=np.ones)


def fits(value: Any, said: Any) -> bool:
    """Whether a value has a type; for lists, tuples and dicts also their items."""
    # From NumPy 2.5 on, NDArray is an alias of its own kind.
    said = getattr(get_origin(said), "__value__", said)
    kind, inner = get_origin(said) or said, get_args(said)
    if said is Any:
        return True
    if kind in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if not isinstance(value, kind):
        return False
    if kind is list:
        return all(fits(each, inner[0]) for each in value)
    if kind is tuple:
        return all(fits(each, one) for each, one in zip(value, inner, strict=True))
    return kind is not dict or all(fits(each, inner[1]) for each in value.values())


def test_results_have_the_annotated_types_and_refused_calls_raise(monkeypatch):
    said = []
    monkeypatch.setitem(sys.modules, "torch", WITHOUT_PYTORCH)
    monkeypatch.setattr(typing, "assert_type", lambda *pair: said.append(pair))
    names = runpy.run_path(str(PROGRAM))
    assert len(said) > 20
    assert [(value, kind) for value, kind in said if not fits(value, kind)] == []
    tree = ast.parse(PROGRAM.read_text(encoding="utf-8"))
    (refused,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "refused"]
    calls = [ast.unparse(each) for each in refused.body[1:]]
    assert len(calls) > 5
    for call in calls:
        with pytest.raises(ValueError, match=r"not|must be"):
            eval(call, names)


def test_a_value_of_another_type_is_found():
    assert fits([[np.ones(2)]], list[list[np.ndarray]])
    assert not fits([[1.0]], list[list[np.ndarray]])
    assert not fits(({"a": 1},), tuple[dict[str, str]])
