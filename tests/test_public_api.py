"""The names that users write: all there, documented, and honest about what is missing."""

import copy
import inspect
import pickle

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
        "center_rules",
        "checkpoint",
        "errors",
    }
    raised = {name for name in vars(gr.errors) if name.endswith("Error") and name not in dir(gr)}
    assert raised == set(), "an error that is not in the package itself"


class Rule(gr.Optimizer):
    """A user's optimizer."""


def decay_rate() -> float:
    return 0.5


def objects_of(mesh) -> list[tuple[object, str, str]]:
    """Objects, what they show, and what their error tells to do instead of a copy, if one raises.

    What is empty is not compared.
    """
    variables = [gr.Variable(np.zeros(2), f"v{place}", device=mesh) for place in range(3)]
    value = gr.PerReplica([device.zeros((2,), "float32") for device in mesh], mesh)
    ops = gr.NcclAllReduce(mesh=mesh[:2])
    copies = gr.AllReduceCrossDeviceOps(
        "hierarchical_copy", 0, 64, reduction_groups=[[0], [1]], wire_dtype="float16"
    )
    pairs = [(value, value)]
    rate = gr.Variable(0.5, "rate", device=mesh[:1])
    descent = gr.GradientDescentOptimizer(0.5)
    acc = gr.ConditionalAccumulator("float32", (None, 2), name="a/b", device=mesh)
    acc.apply_grad(np.ones((1, 2), np.float32))
    closed = gr.SparseConditionalAccumulator("float16", reduction_type="SUM", device=mesh[2])
    closed.close()
    getter = gr.AGNCustomGetter(mesh[4:], center=gr.AGNCenter(mesh))
    gr.get_variable("w", 0.0, custom_getter=getter)
    with mesh.journal() as journal:
        flat = mesh.flat_buffer([(3,), (2, 2)], "float16")
        ops.reduce(gr.ReduceOp.SUM, value, value)
    names = "sim:0, sim:1, sim:2, sim:3, sim:4 and 1 more"
    load, again = "pass its state_dict(), and load that into a new one", "where it is needed"
    return [
        (ops, "<NcclAllReduce nccl, num_packs=1, mesh=<Mesh sim [0, 1]>>", ""),
        (copies, "<AllReduceCrossDeviceOps hierarchical_copy, num_packs=0, "
         "agg_small_grads_max_bytes=64, agg_small_grads_max_group=10, "
         "reduction_groups=((0,), (1,)), wire_dtype=float16>", ""),
        (gr.ReductionToOneDevice("sim:1"), "<ReductionToOneDevice reduce_to_device='sim:1'>", ""),
        (gr.ReductionToOneDevice(), "<ReductionToOneDevice>", ""),
        (ops.prepare(gr.ReduceOp.SUM, pairs), f"<PreparedStep of 1 values on {names}>",
         f"prepare the step again {again}"),
        (gr.HierarchicalCopyAllReduce().capture(gr.ReduceOp.SUM, pairs),
         f"<CapturedStep of 1 values on {names}>", f"prepare the step again {again}"),
        (gr.SyncStep(variables, descent, gr.AllReduceCrossDeviceOps()),
         f"<SyncStep of 3 variables on {names}, global_step 0, num_required 6>", load),
        (acc, f"<ConditionalAccumulator 'b' float32[?, 2] MEAN on {names}, global_step 0, "
         "1 accumulated, 0 dropped>", load),
        (closed, "<SparseConditionalAccumulator 'sparse_conditional_accumulator' float16[?] "
         "SUM on sim:2, global_step 0, 0 accumulated, 0 dropped, closed>", load),
        (gr.MomentumOptimizer(rate, 0.9), "<MomentumOptimizer 'Momentum' learning_rate="
         "<Variable 'rate' float32[] on sim:0>, momentum=0.9, use_nesterov=False>", load),
        (Rule("mine"), "<Rule 'mine'>", load),
        (gr.AdamOptimizer(decay_rate), "<AdamOptimizer 'Adam' learning_rate=decay_rate, beta1=0.9, "
         "beta2=0.999, epsilon=1e-08, eps_mode='tensorflow'>", load),
        (getter, "<AGNCustomGetter of 1 variables on sim:4, sim:5>", "create one for each worker"),
        (getter.center, f"<AGNCenter of 1 variables on {names}>", load),
        (gr.AGNOptimizer(descent, 2, getter), "<AGNOptimizer 'AGNOptimizer' of "
         "<GradientDescentOptimizer 'GradientDescent' learning_rate=0.5>, communication_period 10, "
         "local_step 0>", load),
        (flat, f"<FlatBuffer of 2 tensors of float16, 32 bytes, on {names}>", ""),
        (journal, f"<Journal of {len(journal.records)} records: {journal.launches} launches, "
         f"{journal.copies} copies, {journal.bytes} bytes, 0 uploads, 0 syncs>", ""),
        (rate, "", "pass variable.numpy(), and make a new Variable of it"),
        (mesh, "", f"open one by gr.open_mesh {again}"),
        (mesh[0], "", f"open a mesh by gr.open_mesh {again}"),
        (mesh[1:], "", f"open one by gr.open_mesh {again}"),
        (value, "", "pass NumPy arrays"),
        (value[0], "", "pass buffer.numpy()"),
    ]  # fmt: skip


def test_what_an_object_shows_and_how_it_is_copied_instead():
    with gr.open_mesh(6, backend="sim") as mesh:
        for held, shown, instead in objects_of(mesh):
            assert shown in ("", repr(held))
            text = f"{type(held).__name__} objects cannot be pickled or copied; {instead}"
            for call in (pickle.dumps, copy.deepcopy, copy.copy, lambda one: pickle.dumps([one])):
                if instead:
                    with pytest.raises(TypeError) as error:
                        call(held)
                    assert str(error.value).startswith(text)
        with pytest.raises(TypeError, match=r"^Buffer objects cannot be pickled"):
            copy.deepcopy(mesh.flat_buffer([(2,)], "float32"))
    ops = gr.HierarchicalCopyAllReduce()
    assert pickle.loads(pickle.dumps(ops)).settings == ops.settings
