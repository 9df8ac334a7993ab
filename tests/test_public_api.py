"""The names that users write: all there, documented, and honest about what is missing."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import numpy as np
import pytest
from support import golden_files

import gradreduce as gr


def test_public_names_and_signatures_are_those_of_the_file():
    golden_files.check("public_api.txt")


def test_every_public_name_has_a_docstring_whose_first_line_has_at_most_15_words():
    firsts = {
        name: (inspect.getdoc(found) or "").partition("\n")[0]
        for name, found in golden_files.public_objects()
    }
    assert {name: line for name, line in firsts.items() if not 0 < len(line.split()) <= 15} == {}


def test_dir_shows_public_names_and_modules_alone():
    assert sorted(dir(gr)) == sorted([*gr.__all__, "__version__"])
    assert {name for name in dir(gr) if inspect.ismodule(getattr(gr, name))} == {
        "autodiff",
        "checkpoint",
        "errors",
    }
    raised = {name for name in vars(gr.errors) if name.endswith("Error") and name not in dir(gr)}
    assert raised == set(), "an error that is not in the package itself"


class Rule(gr.Optimizer):
    """A user's optimizer."""


def shown_objects(mesh) -> dict[str, str]:
    """``repr`` of what has one -> what it says."""
    variables = [gr.Variable(np.zeros(2), f"v{place}", device=mesh) for place in range(3)]
    value = gr.PerReplica([device.zeros((2,), "float32") for device in mesh], mesh)
    ops = gr.NcclAllReduce(mesh=mesh[:2])
    pairs = [(value, value)]
    rate = gr.Variable(0.5, "rate", device=mesh[:1])
    step = gr.SyncStep(variables, gr.GradientDescentOptimizer(0.5), gr.AllReduceCrossDeviceOps())
    acc = gr.ConditionalAccumulator("float32", (None, 2), name="a/b", device=mesh)
    acc.apply_grad(np.ones((1, 2), np.float32))
    closed = gr.SparseConditionalAccumulator("float16", reduction_type="SUM", device=mesh[2])
    closed.close()
    getter = gr.AGNCustomGetter(mesh[4:], center=gr.AGNCenter(mesh))
    gr.get_variable("w", 0.0, custom_getter=getter)
    inner = gr.AdamOptimizer(decay_rate)
    with mesh.journal() as journal:
        flat = mesh.flat_buffer([(3,), (2, 2)], "float16")
        ops.reduce(gr.ReduceOp.SUM, value, value)
    names = "sim:0, sim:1, sim:2, sim:3, sim:4 and 1 more"
    return {
        repr(ops): "<NcclAllReduce nccl, num_packs=1, mesh=<Mesh sim [0, 1]>>",
        repr(
            gr.AllReduceCrossDeviceOps(
                "hierarchical_copy", 0, 64, reduction_groups=[[0], [1]], wire_dtype="float16"
            )
        ): "<AllReduceCrossDeviceOps hierarchical_copy, num_packs=0, agg_small_grads_max_bytes="
        "64, agg_small_grads_max_group=10, reduction_groups=((0,), (1,)), wire_dtype=float16>",
        repr(gr.ReductionToOneDevice("sim:1")): "<ReductionToOneDevice reduce_to_device='sim:1'>",
        repr(gr.ReductionToOneDevice()): "<ReductionToOneDevice>",
        repr(ops.prepare(gr.ReduceOp.SUM, pairs)): f"<PreparedStep of 1 values on {names}>",
        repr(gr.HierarchicalCopyAllReduce().capture(gr.ReduceOp.SUM, pairs)): "<CapturedStep of 1 "
        f"values on {names}>",
        repr(step): f"<SyncStep of 3 variables on {names}, global_step 0, num_required 6>",
        repr(acc): f"<ConditionalAccumulator 'b' float32[?, 2] MEAN on {names}, global_step 0, "
        "1 accumulated, 0 dropped>",
        repr(closed): "<SparseConditionalAccumulator 'sparse_conditional_accumulator' float16[?] "
        "SUM on sim:2, global_step 0, 0 accumulated, 0 dropped, closed>",
        repr(gr.MomentumOptimizer(rate, 0.9)): "<MomentumOptimizer 'Momentum' learning_rate="
        "<Variable 'rate' float32[] on sim:0>, momentum=0.9, use_nesterov=False>",
        repr(Rule("mine")): "<Rule 'mine'>",
        repr(inner): "<AdamOptimizer 'Adam' learning_rate=decay_rate, beta1=0.9, beta2=0.999, "
        "epsilon=1e-08, eps_mode='tensorflow'>",
        repr(getter): "<AGNCustomGetter of 1 variables on sim:4, sim:5>",
        repr(getter.center): f"<AGNCenter of 1 variables on {names}>",
        repr(gr.AGNOptimizer(gr.GradientDescentOptimizer(0.5), 2, getter)): "<AGNOptimizer "
        "'AGNOptimizer' of <GradientDescentOptimizer 'GradientDescent' learning_rate=0.5>, "
        "communication_period 10, local_step 0>",
        repr(flat): f"<FlatBuffer of 2 tensors of float16, 32 bytes, on {names}>",
        repr(journal): f"<Journal of {len(journal.records)} records: {journal.launches} launches, "
        f"{journal.copies} copies, {journal.bytes} bytes, 0 uploads, 0 syncs>",
    }


def decay_rate() -> float:
    return 0.5


def test_reprs_tell_what_an_object_is_in_one_line():
    with gr.open_mesh(6, backend="sim") as mesh:
        for found, wanted in shown_objects(mesh).items():
            assert found == wanted


@pytest.fixture
def mesh():
    with gr.open_mesh(2, backend="sim") as opened:
        yield opened


def test_what_holds_devices_says_how_to_copy_it(mesh):
    variable = gr.Variable(np.ones(2, np.float32), "v", device=mesh)
    value = gr.PerReplica([device.zeros((2,), "float32") for device in mesh], mesh)
    ops = gr.HierarchicalCopyAllReduce()
    optimizer = gr.AdamOptimizer()
    getter = gr.AGNCustomGetter(mesh, center=gr.AGNCenter(mesh))
    load, again = "pass its state_dict(), and load that into a new one", "where it is needed"
    for held, instead in [
        (variable, "pass variable.numpy(), and make a new Variable of it"),
        (mesh, f"open one by gr.open_mesh {again}"),
        (mesh[0], f"open a mesh by gr.open_mesh {again}"),
        (mesh[1:], f"open one by gr.open_mesh {again}"),
        (value, "pass NumPy arrays"),
        (value[0], "pass buffer.numpy()"),
        (ops.prepare(gr.ReduceOp.SUM, [(value, value)]), f"prepare the step again {again}"),
        (ops.capture(gr.ReduceOp.SUM, [(value, value)]), f"prepare the step again {again}"),
        (gr.SyncStep([variable], optimizer, ops), load),
        (gr.ConditionalAccumulator("float32", device=mesh), load),
        (gr.SparseConditionalAccumulator("float32", device=mesh), load),
        (optimizer, load),
        (Rule("mine"), load),
        (gr.AGNOptimizer(gr.GradientDescentOptimizer(1.0), 1, getter), load),
        (getter.center, load),
        (getter, "create one for each worker"),
    ]:
        text = f"^{type(held).__name__} objects cannot be pickled or copied; {re.escape(instead)}"
        for call in (pickle.dumps, copy.deepcopy, copy.copy, lambda one: pickle.dumps([one], 0)):
            with pytest.raises(TypeError, match=text):
                call(held)
    with pytest.raises(TypeError, match=r"^Buffer objects cannot be pickled"):
        copy.deepcopy(mesh.flat_buffer([(2,)], "float32"))
    assert pickle.loads(pickle.dumps(ops)).settings == ops.settings
