"""Checkpoints of every class: what a file gives back continues with the same bits; errors."""

import copy
import importlib
import io
import json
import pickle

import numpy as np
import pytest
from support import golden_files
from support.checkpoint_cases import CASES, after_steps, bits, changed, leaves, where

import gradreduce as gr
from gradreduce.checkpoint import downloader


@pytest.fixture(params=CASES)
def case(request):
    with after_steps(CASES[request.param]) as made:
        yield made


def test_states_have_the_entries_of_the_file():
    golden_files.check("checkpoints.txt")


@pytest.mark.parametrize("name", CASES)
def test_states_that_version_0_1_wrote_are_loaded_and_written_alike(name):
    """``saved_states.json`` has results of ``split``. Only a new format adds states to it."""
    all_saved = json.loads((golden_files.DATA / "saved_states.json").read_text())
    saved = all_saved[name.removeprefix("sharded_")]
    tensors = {
        key: np.array(values, dtype).reshape(shape)
        for key, (dtype, shape, values) in saved["tensors"].items()
    }
    with after_steps(CASES[name]) as case:
        fresh = case.fresh()
        fresh.load(gr.checkpoint.join(tensors, saved["metadata"]))
        found, metadata = gr.checkpoint.split(fresh.save())
    assert metadata == saved["metadata"]
    assert bits(found) == bits(tensors)


# -- files ----------------------------------------------------------------------------------------


def pickled(save):
    return pickle.loads(pickle.dumps(save()))


def as_npz(save):
    tensors, metadata = gr.checkpoint.split(save())
    np.savez(file := io.BytesIO(), **tensors, **metadata)
    file.seek(0)
    with np.load(file) as stored:
        return gr.checkpoint.join(stored, stored)


def as_arrays(save):
    """As a store that has nothing but arrays, tuples and None; and whose arrays are read-only."""

    def stored(value):
        if isinstance(value, dict):
            return {key: stored(each) for key, each in value.items()}
        if isinstance(value, list) and any(isinstance(each, dict | np.ndarray) for each in value):
            return tuple(map(stored, value))
        found = None if value is None else np.array(value)
        if found is not None:
            found.setflags(write=False)
        return found

    return stored(save())


def as_safetensors(save, path, library="numpy"):
    import safetensors

    tensors, metadata = gr.checkpoint.split(save(output_type=library))
    importlib.import_module(f"safetensors.{library}").save_file(tensors, path, metadata)
    with safetensors.safe_open(path, {"numpy": "np", "torch": "pt"}[library]) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
        return gr.checkpoint.join(tensors, file.metadata())


def by_torch(save):
    import torch

    state = save(output_type="torch")
    kinds = {type(leaf) for _, leaf in leaves(state)}
    assert kinds <= {torch.Tensor, str, int, float, bool, type(None), list}
    assert all(leaf.is_cpu for _, leaf in leaves(state) if isinstance(leaf, torch.Tensor))
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file)  # with its default, weights_only=True


def by_torch_safetensors(save, path):
    return as_safetensors(save, path, "torch")


STORES = [
    pickled,
    as_npz,
    as_arrays,
    pytest.param(as_safetensors, marks=pytest.mark.safetensors),
    pytest.param(by_torch, marks=pytest.mark.torch),
    pytest.param(by_torch_safetensors, marks=[pytest.mark.torch, pytest.mark.safetensors]),
]


@pytest.mark.whole_product
@pytest.mark.parametrize("store", STORES)
def test_what_a_file_gives_back_continues_with_the_same_bits(case, store, tmp_path):
    path = [tmp_path / "state.safetensors"] if "safetensors" in store.__name__ else []
    saved = store(case.save, *path)
    kept = copy.deepcopy(saved)
    wanted = bits(case.save())
    fresh = case.fresh()
    fresh.step(7)  # of another life
    fresh.load(saved)
    assert bits(fresh.save()) == wanted
    variables = getattr(fresh, "variables", ()), getattr(case, "variables", ())
    for mine, other in zip(*variables, strict=True):
        mine.assign(other.numpy())  # which a state of an optimizer does not have
    for seed in range(10, 13):
        case.step(seed)
        fresh.step(seed)
    if "AGN" not in str(saved["format"]):  # where worker and center have a part each
        assert bits(fresh.save()) == bits(case.save())
    assert bits(saved) == bits(kept), "a load, or a step after it, wrote the caller's arrays"


def test_a_state_is_a_consistent_snapshot(case):
    state = case.save()
    before = bits(state)
    case.step(9)
    assert bits(state) == before
    assert bits(case.save()) != before
    with pytest.raises(ValueError) as error:
        case.save(output_type="jax")
    assert str(error.value) == "output_type='jax' is not one of ('numpy', 'torch')"


def test_arrays_and_all_else_are_split():
    state = {"a.b": {"c": np.ones(2)}, "a": {"b.c": np.zeros(3)}, "tensor": {"tensor": "x", "y": 1}}
    tensors, metadata = gr.checkpoint.split(state)
    assert {name: each.tolist() for name, each in tensors.items()} == {
        "a.b.c": [1, 1],
        "a.b.c_": [0, 0, 0],
    }
    assert bits(gr.checkpoint.join(tensors, {**metadata, "other": "1"})) == bits(state)
    with pytest.raises(KeyError, match=r"tensors has no 'a\.b\.c_', which the metadata names"):
        gr.checkpoint.join({"a.b.c": 1}, metadata)
    for none in (None, {}, {"format": "pt"}):
        with pytest.raises(ValueError, match="has no 'gradreduce': pass that of split"):
            gr.checkpoint.join(tensors, none)


def test_variables_may_have_the_names_of_entries():
    names = ["format", "tensor", "slots", "a.b", "a", "ä/1 "]

    def made(start):
        variables = [gr.Variable(np.full(2, start), each, device=mesh) for each in names]
        step = gr.SyncStep(
            variables, gr.AdamOptimizer(0.1), gr.AllReduceCrossDeviceOps(mesh=mesh), num_required=2
        )
        step([[[np.ones(2)]] * len(names)])
        return step

    with gr.open_mesh(1, backend="sim") as mesh:
        saved, other = made(0.5), made(2.0)
        other.load_state_dict(gr.checkpoint.join(*gr.checkpoint.split(saved.state_dict())))
        assert bits(other.state_dict()) == bits(saved.state_dict())


# -- what is wrong --------------------------------------------------------------------------------


ANY = {"kind"}  # has tests with its class
OPTIONAL = {"sparse_mean"}  # states of older versions have no such entry


def of_array(path, leaf):
    """The values that an array must not have, each with its error."""
    name = where(path)
    wanted = f"expected {leaf.dtype}{leaf.shape}"
    yield [1.0], TypeError, f"{name} is a list; expected an array"
    yield leaf.astype("float64"), ValueError, f"{name} is float64{leaf.shape}; {wanted}"
    if path[-1] != "indices":  # which say how many rows there are
        yield leaf[None], ValueError, f"{name} is {leaf.dtype}{leaf[None].shape}; {wanted}"
    swapped = leaf.astype(leaf.dtype.newbyteorder())
    yield swapped, TypeError, f"{name}: dtype {swapped.dtype.str} cannot be added"


def of_leaf(path, leaf):
    """The values that an entry must not have, each with its error."""
    name = where(path)
    if path[-1] == "sum_shape":
        return
    if isinstance(leaf, np.ndarray):
        yield from of_array(path, leaf)
    elif isinstance(leaf, bool):
        yield 1.5, TypeError, f"{name}=1.5 must be"
    elif isinstance(leaf, int):
        yield 1.5, TypeError, f"{name}=1.5 must be an integer"
        least = -(2**63) if path[-1] == "global_step" else int(path[-1].startswith("num_re"))
        yield least - 1, ValueError, f"{name}={least - 1} must be at least {least}"
    elif isinstance(leaf, float):
        yield "x", (TypeError, ValueError), f"{name}='x' must be a number"
        if "beta" in path[-1]:
            yield 1.0, ValueError, f"{name}=1.0 must be at least 0 and below 1"
    elif leaf is not None and path[-1] not in ANY:
        wrong, shown = ([np.ones(())], "[1.0]") if isinstance(leaf, list) else ("x", "'x'")
        yield wrong, ValueError, f"{name} is {shown}; expected {leaf!r}"


def of_dicts(state, path=()):
    """States with a key too few or too many, each with its error."""
    inner = state
    for key in path:
        inner = inner[key]
    if isinstance(inner, dict):
        name = where(path)
        yield changed(state, (*path, "more"), 1), KeyError, f"{name} has wrong keys: 'more' unknown"
        if path[-1:] not in [("slots",), ("sums",), ("pulled",)]:  # may have fewer
            for key in inner.keys() - OPTIONAL:
                text = f"{name} has wrong keys: {key!r} missing"
                yield changed(state, (*path, key), ...), KeyError, text
        if path:
            text = f"{name} is a int; expected a dict"
            if "partial_sums" not in path and path[-2:-1] != ("sums",):
                yield changed(state, path, 3), TypeError, text
        for key in inner:
            yield from of_dicts(state, (*path, key))


def test_what_is_wrong_is_named_and_changes_nothing(case):
    state = case.save()
    before = bits(state)
    damages = [([state], TypeError, "state is a list; expected a dict"), *of_dicts(state)]
    for path, leaf in leaves(state):
        damages += [(changed(state, path, value), *error) for value, *error in of_leaf(path, leaf)]
    version = str(state["format"])[:-1] + "0"
    text = f"state['format'] is {version!r}; expected {state['format']!r}"
    damages.append(({"format": version}, ValueError, text))  # whose keys were others
    for damaged, error, text in damages:
        with pytest.raises(error) as raised:
            case.load(damaged)
        assert text in str(raised.value.args[0])
    assert bits(case.save()) == before
    assert len(damages) > 20


def test_the_class_is_compared_before_its_hyperparameters():
    state = gr.AdamWOptimizer(0.1).state_dict()
    text = r"^state\['optimizer'\] is 'AdamWOptimizer'; expected 'AdamOptimizer'$"
    with pytest.raises(ValueError, match=text):
        gr.AdamOptimizer(0.1).load_state_dict(state, [])


def test_names_that_differ_are_named():
    """Variables without a name are numbered as they are made."""

    def step_of(*variables):
        descent, ops = gr.GradientDescentOptimizer(0.1), gr.AllReduceCrossDeviceOps(mesh=mesh)
        return gr.SyncStep(variables, descent, ops)

    with gr.open_mesh(1, backend="sim") as mesh:
        variables = [gr.Variable(np.ones(2), dtype="float32", device=mesh) for _ in range(4)]
        one, two, *others = variables
        optimizers = [gr.MomentumOptimizer(0.1, 0.5) for _ in range(2)]
        for made, own in zip(optimizers, ((one, two), others), strict=True):
            made.apply_gradients([(np.ones(2, np.float32), each) for each in own])
        with pytest.raises(KeyError) as of_slots:
            optimizers[1].load_state_dict(optimizers[0].state_dict(), others)
        state = step_of(one, two).state_dict()
        step_of(one, two).load_state_dict(state)
        with pytest.raises(KeyError) as of_order:
            step_of(two, one).load_state_dict(state)
    hint = "Variables without a name are numbered as they are made: give each a name"
    assert of_slots.value.args[0] == (
        f"state['slots'] has wrong keys: {one.name!r}, {two.name!r} unknown; {hint}"
    )
    assert of_order.value.args[0] == (
        f"state['variables'] has {one.name}, {two.name} in this order; expected {two.name}, "
        f"{one.name}; {hint}"
    )


# -- hyperparameters ------------------------------------------------------------------------------


class Scaled(gr.Optimizer):
    """With a hyperparameter of its own."""

    _hyperparameters = ("rate",)

    def __init__(self, rate):
        super().__init__("Scaled")
        self.rate, self.note = rate, rate

    def _apply(self, variable, slots, gradient):
        variable -= self.rate * gradient


def test_hyperparameters_that_are_numbers_are_restored():
    with gr.open_mesh(1, backend="sim") as mesh:
        w = gr.Variable(np.ones(2), "w", dtype="float32", device=mesh)
        saved = gr.MomentumOptimizer(np.float32(0.25), lambda: 0.5, use_nesterov=True).state_dict()
        wanted = {"learning_rate": 0.25, "momentum": None, "use_nesterov": True}
        assert saved["hyperparameters"] == wanted
        assert type(saved["hyperparameters"]["learning_rate"]) is float
        made = gr.MomentumOptimizer(0.1, 0.75)
        made.learning_rate = np.array(0.125)
        assert made.state_dict()["hyperparameters"]["learning_rate"] == 0.125
        made.load_state_dict(saved, w)
        assert (made.learning_rate, made.momentum, made.use_nesterov) == (0.25, 0.75, True)
        scheduled = gr.MomentumOptimizer(lambda: 0.5, 0.75)
        scheduled.load_state_dict(saved, w)
        assert scheduled.learning_rate() == 0.5, "what the program computes stays"
        own, other = Scaled(2), Scaled(0.5)
        assert own.state_dict()["hyperparameters"] == {"rate": 2}
        other.load_state_dict(own.state_dict(), w)
        assert (other.rate, other.note) == (2, 0.5)


@pytest.mark.torch
def test_tensors_of_a_state_can_be_written():
    """PyTorch warns of a tensor that shares a read-only array, as actors of Ray return."""
    import torch

    array = np.ones(2)
    array.flags.writeable = False
    found = downloader(None, "torch")({"sums": [array]})["sums"][0]
    assert found.add_(1).equal(torch.full((2,), 2.0, dtype=torch.float64))
    assert array.tolist() == [1, 1]
