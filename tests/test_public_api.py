"""The names that users write: all there, documented, and honest about what is missing."""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
import re

import numpy as np
import pytest

import gradreduce as gr

NAMES = """
open_mesh default_mesh ReduceOp PerReplica Mirrored IndexedSlices AggregationMethod add_n
accumulate_n aggregate AllReduceCrossDeviceOps CrossDeviceOps all_reduce NcclAllReduce
HierarchicalCopyAllReduce ReductionToOneDevice ConditionalAccumulatorBase ConditionalAccumulator
SparseConditionalAccumulator apply_grads take_grads Variable replica get_variable Optimizer
GradientDescentOptimizer MomentumOptimizer AdamOptimizer AdagradOptimizer RMSPropOptimizer
clip_by_global_norm AGNCenter AGNCustomGetter AGNOptimizer SyncStep errors embedding_lookup autodiff
""".split()

SIGNATURES = {
    "open_mesh": "(devices=None, *, backend=None, processes=None, peer_access=True, "
    "kernels='numpy', strict=None, schedule_seed=None)",
    "PerReplica": "(values, mesh=None, *, devices=None)",
    "IndexedSlices": "(values, indices, dense_shape=None)",
    "add_n": "(inputs, name=None, *, output_type=None)",
    "accumulate_n": "(inputs, shape=None, tensor_dtype=None, name=None, *, output_type=None)",
    "aggregate": "(terms, method=<AggregationMethod.ADD_N: 0>, *, output_type=None)",
    "AllReduceCrossDeviceOps": "(all_reduce_alg='nccl', num_packs=1, agg_small_grads_max_bytes=0, "
    "agg_small_grads_max_group=10, *, mesh=None, reduction_groups=None, wire_dtype=None)",
    "NcclAllReduce": "(num_packs=1, *, mesh=None, wire_dtype=None)",
    "HierarchicalCopyAllReduce": "(num_packs=1, *, mesh=None, reduction_groups=None, "
    "wire_dtype=None)",
    "all_reduce": "(grads, op=<ReduceOp.MEAN: 'MEAN'>, *, mesh=None, coalesce=False, "
    "output_type=None, out=None, wire_dtype=None, deadline=None)",
    "CrossDeviceOps.reduce": "(self, reduce_op, per_replica_value, destinations, *, "
    "coalesce=False, output_type=None, out=None, deadline=None)",
    "CrossDeviceOps.batch_reduce": "(self, reduce_op, value_destination_pairs, *, coalesce=False, "
    "output_type=None, out=None, deadline=None)",
    "CrossDeviceOps.broadcast": "(self, tensor, destinations, *, output_type=None, out=None, "
    "deadline=None)",
    "AllReduceCrossDeviceOps.all_reduce": "(self, grads, op=<ReduceOp.MEAN: 'MEAN'>, *, "
    "coalesce=False, output_type=None, out=None, deadline=None)",
    "AllReduceCrossDeviceOps.plan": "(self, reduce_op, value_destination_pairs, *, coalesce=False)",
    "AllReduceCrossDeviceOps.profile": "(self, reduce_op, value_destination_pairs, *, "
    "coalesce=False, deadline=None)",
    "AllReduceCrossDeviceOps.prepare": "(self, reduce_op, value_destination_pairs, *, "
    "output_type=None, out=None, deadline=None)",
    "AllReduceCrossDeviceOps.capture": "(self, reduce_op, value_destination_pairs, *, "
    "output_type=None, out=None, deadline=None)",
    "Variable.numpy": "(self, *, deadline=None)",
    "Optimizer.apply_gradients": "(self, grads_and_vars, global_step=None, name=None, *, "
    "deadline=None)",
    "Optimizer.compute_gradients": "(self, loss, var_list=None, gate_gradients=1, "
    "aggregation_method=None, colocate_gradients_with_ops=False, grad_loss=None, *, engine=None)",
    "Optimizer.minimize": "(self, loss, global_step=None, var_list=None, gate_gradients=1, "
    "aggregation_method=None, colocate_gradients_with_ops=False, name=None, grad_loss=None, *, "
    "engine=None, deadline=None)",
    "embedding_lookup": "(params, ids)",
    "autodiff.relu": "(x)",
    "autodiff.sigmoid": "(x)",
    "autodiff.logsumexp": "(x, axis=None, keepdims=False)",
    "autodiff.softmax_cross_entropy": "(logits, labels)",
    "autodiff.stop_gradient": "(x)",
    "ReductionToOneDevice": "(reduce_to_device=None, accumulation_fn=None, *, mesh=None)",
    "ConditionalAccumulator": "(dtype, shape=None, shared_name=None, "
    "name='conditional_accumulator', reduction_type='MEAN', *, device=None, "
    "cross_device_ops=None)",
    "Variable": "(initial_value, name=None, *, trainable=True, dtype=None, device=None)",
    "get_variable": "(name, initial_value=None, *, shape=None, dtype=None, trainable=True, "
    "reuse=False, custom_getter=None)",
    "AGNOptimizer": "(optimizer, num_worker, custom_getter, communication_period=10, "
    "use_locking=True, name='AGNOptimizer', *, distance_scale=None, reset_momentum=False)",
    "AGNCenter": "(mesh=None)",
    "AGNCustomGetter": "(worker_device, *, center=None)",
    "SyncStep": "(variables, optimizer, cross_device_ops, *, "
    "aggregation_method=<AggregationMethod.ADD_N: 0>, num_required=None)",
}

MEMBERS = {
    "ConditionalAccumulator": "apply_grad take_grad num_accumulated set_global_step close "
    "global_step num_dropped state_dict load_state_dict accumulator_ref dtype name",
    "SparseConditionalAccumulator": "apply_grad apply_indexed_slices_grad take_grad "
    "take_indexed_slices_grad",
    "AllReduceCrossDeviceOps": "reduce batch_reduce broadcast all_reduce plan profile "
    "prepare capture",
    "AGNOptimizer": "compute_gradients apply_gradients minimize get_init_op "
    "make_session_run_hook get_name get_slot get_slot_names variables local_step "
    "cross_device_ops state_dict load_state_dict",
    "AGNCenter": "variables lost_workers start_worker state_dict load_state_dict",
    "AGNCustomGetter": "center_variable accumulation",
    "IndexedSlices": "values indices dense_shape dtype shape device coalesce to_dense",
    "Mirrored": "values primary get devices",
    "PerReplica": "values devices mesh",
    "Variable": "numpy read assign assign_add",
    "Optimizer": "GATE_NONE GATE_OP GATE_GRAPH cross_device_ops compute_gradients minimize",
    "Mesh": "devices num_replicas process_index num_processes journal flat_buffer trim "
    "flight_record reset",
}

ERRORS = {
    "InvalidArgumentError": ValueError,
    "CancelledError": Exception,
    "DeadlineExceededError": TimeoutError,
    "DeviceMismatchError": Exception,
    "BackendUnavailableError": Exception,
    "CollectiveError": Exception,
    "InvalidVariableError": (TypeError, ValueError),
}


@pytest.mark.parametrize("name", NAMES)
def test_name_is_public_and_documented(name):
    thing = getattr(gr, name)
    assert name in gr.__all__
    assert inspect.getdoc(thing), f"{name} has no docstring"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_published_one(name):
    signature = inspect.signature(operator.attrgetter(name)(gr))
    bare = signature.replace(
        parameters=[
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in signature.parameters.values()
        ],
        return_annotation=inspect.Signature.empty,
    )
    assert str(bare) == SIGNATURES[name]


@pytest.mark.parametrize(("name", "members"), MEMBERS.items())
def test_members_are_there_and_documented(name, members):
    for member in members.split():
        found = inspect.getattr_static(getattr(gr, name), member, None)
        in_docstring = member in (inspect.getdoc(getattr(gr, name)) or "")
        assert found is not None or in_docstring, f"{name}.{member} is missing"
        if callable(found) or isinstance(found, property):
            assert inspect.getdoc(found), f"{name}.{member} has no docstring"


@pytest.mark.parametrize(("name", "bases"), ERRORS.items())
def test_errors_have_their_bases(name, bases):
    error = getattr(gr.errors, name)
    for base in bases if isinstance(bases, tuple) else (bases,):
        assert issubclass(error, base)


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
        "epsilon=1e-08>",
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
        (gr.SyncStep([variable], optimizer, ops), "pass the state_dict() of its optimizer"),
        (gr.ConditionalAccumulator("float32", device=mesh), load),
        (gr.SparseConditionalAccumulator("float32", device=mesh), load),
        (optimizer, load),
        (Rule("mine"), load),
        (gr.AGNOptimizer(gr.GradientDescentOptimizer(1.0), 1, getter), load),
        (getter.center, load),
        (getter, "make one for each worker"),
    ]:
        text = f"^{type(held).__name__} objects cannot be pickled or copied; {re.escape(instead)}"
        for call in (pickle.dumps, copy.deepcopy, copy.copy, lambda one: pickle.dumps([one], 0)):
            with pytest.raises(TypeError, match=text):
                call(held)
    with pytest.raises(TypeError, match=r"^Buffer objects cannot be pickled"):
        copy.deepcopy(mesh.flat_buffer([(2,)], "float32"))
    assert pickle.loads(pickle.dumps(ops)).settings == ops.settings
