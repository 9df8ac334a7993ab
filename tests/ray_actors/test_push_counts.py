"""What a push costs the device of an actor, counted in one process."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import gradreduce as gr

pytestmark = pytest.mark.ray

SHAPES = {"a": (3,), "b": (5, 2), "big": (200, 100)}
MORE = {"big": 1}  # launches of tensors that travel alone; the simulation does not copy them


def state_of(optimizer):
    """The state of an actor with the variables, and a function that pushes ones to them."""
    from gradreduce.optim.agn.push import PushConfig
    from gradreduce.ray.center import _rule_of
    from gradreduce.ray.center_state import CenterShardState, PushRequest
    from gradreduce.ray.messages import Layout, specs_of
    from gradreduce.ray.shard import Settings

    def message(arrays):
        return Layout(specs_of(arrays)).message(arrays)

    state = CenterShardState(Settings("counts", 0, 1, None, 1, 0))
    for name, shape in SHAPES.items():
        state.create(name, message([np.zeros(shape, np.float32)]))
    state.join(_rule_of(optimizer), None)

    def push(names):
        request = PushRequest([names], frozenset(), PushConfig(2, None, "w"), (0.5,), {})
        return state.push(request, message([np.ones(SHAPES[name], np.float32) for name in names]))

    return state, push


@pytest.mark.parametrize("names", [["a", "b"], ["a", "b", "big"]])
def test_small_tensors_are_one_upload_one_launch_and_one_download(names):
    from gradreduce.ray.messages import Layout

    state, push = state_of(gr.GradientDescentOptimizer(0.5))
    push(names)
    with state._device.mesh_state.log.journal() as journal:
        answer = push(names)
    found = Counter(record.name or record.kind for record in journal.records)
    alone = sum(MORE.get(name, 0) for name in names)
    assert found == {"upload": 1, "global_sgd": 1 + alone, "download": 1}
    for array in Layout.of(answer.form).arrays(answer):
        assert (array == -0.5).all()


def test_another_set_of_variables_or_a_load_is_planned_anew():
    from gradreduce.ray.messages import Layout

    state, push = state_of(gr.GradientDescentOptimizer(0.5))
    for names in (["a", "b"], ["b", "a"], ["b"]):
        answer = push(names)
    assert (Layout.of(answer.form).arrays(answer)[0] == -0.75).all()
    saved = state.save()["center"]
    more = {name: value + 1 for name, value in saved["variables"].items()}
    state.load_center({**saved, "variables": more}, None)
    answer = push(["b"])
    assert (Layout.of(answer.form).arrays(answer)[0] == 0).all()
