"""Terms from an iterator: live buffers, launches, and terms on several devices."""

import math
import weakref

import numpy as np
import pytest
from sums.test_aggregation import ADD_N, TREE, reference
from support.exact_data import random_data, same

import gradreduce as gr
from gradreduce.backends.sim.device import SimDevice
from gradreduce.device import Buffer, accumulate_dtype

ACCUMULATE_N = 2
SIZE = 40


def arrays(count: int, dtype="float32") -> list[np.ndarray]:
    return list(random_data((count, SIZE), dtype, seed=count))


# -- laziness -------------------------------------------------------------------------------------


class LiveBuffers:
    """Counts the live buffers of one dtype, terms and sums, when a launch begins."""

    def __init__(self, monkeypatch, dtype) -> None:
        self.buffers: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self.peak = 0
        launch, empty = SimDevice._launch, SimDevice.allocate

        def counting_launch(device, *arguments, **options):
            self.peak = max(self.peak, len(self.buffers))
            launch(device, *arguments, **options)

        def counting_empty(device, shape, made_of):
            buffer = empty(device, shape, made_of)
            if buffer.dtype == dtype:
                self.buffers.add(buffer)
            return buffer

        monkeypatch.setattr(SimDevice, "_launch", counting_launch)
        monkeypatch.setattr(SimDevice, "allocate", counting_empty)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 31, 32, 33, 200])
def test_the_peak_number_of_live_buffers(mesh, monkeypatch, method, count, dtype):
    wide = accumulate_dtype(np.dtype(dtype))
    live = LiveBuffers(monkeypatch, wide)
    values = arrays(count, dtype)

    def terms():
        for value in values:
            yield mesh.devices[1].upload(value)

    total = gr.aggregate(terms(), method, output_type="buffer")
    assert same(total.numpy(), reference(values, method))
    pushed = dtype != "float32"  # the term just pushed counts if it has the dtype
    limit = {
        ADD_N: count + 1,
        TREE: math.ceil(math.log2(count)) + 1,
        ACCUMULATE_N: min(count, 3),
    }[method]
    if count > 1:
        assert live.peak + pushed <= max(limit, 3)
    if method == ADD_N and count > 1 and not pushed:
        assert live.peak == count + 1  # the counter works


def test_a_failing_iterable_leaves_everything_as_it_was(mesh, method):
    values = arrays(4)
    copies = [value.copy() for value in values]

    def terms():
        yield from values
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        gr.aggregate(terms(), method)
    with pytest.raises(TypeError, match="input 0 is float32, input 4 is float64"):
        gr.aggregate(iter([*values, np.ones(SIZE)]), method)
    with pytest.raises(ValueError, match=r"Input 0: \[40\] != input 4: \[39\]"):
        gr.aggregate(iter([*values, values[0][1:]]), method)
    with pytest.raises(TypeError, match="str is not an array"):
        gr.aggregate(iter([*values, "no array"]), method)
    for value, copy in zip(values, copies, strict=True):
        assert same(value, copy)


def launches(mesh, call) -> list[str]:
    with mesh.journal() as journal:
        call()
    return [record.name for record in journal.records if record.kind == "launch"]


def test_what_is_launched_as_terms_come(mesh):
    values = [mesh.devices[0].upload(value) for value in arrays(8)]
    assert launches(mesh, lambda: gr.aggregate(iter(values), ADD_N)) == ["add_n"]
    assert launches(mesh, lambda: gr.aggregate(iter(values), ACCUMULATE_N)) == [
        "add_n", *["accumulate_n"] * 6,
    ]  # fmt: skip
    # Each pair is added directly to the sum of the pair before it: (0+1), that + (2+3), (4+5), …
    assert launches(mesh, lambda: gr.aggregate(iter(values), TREE)) == [
        "add_n", "all_sum", "add_n", "all_sum", "accumulate_n",
    ]  # fmt: skip
    assert launches(mesh, lambda: gr.accumulate_n(values)) == ["add_n"]


# -- several devices ------------------------------------------------------------------------------


def spread(mesh, values, places):
    return [mesh.devices[place].upload(value) for value, place in zip(values, places, strict=True)]


@pytest.mark.parametrize("lazy", [False, True], ids=["listed", "lazy"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "complex64"])
@pytest.mark.parametrize(
    "places", [(0, 1), (2, 0, 2), (3, 0, 0, 2, 3, 1, 1), (1, 2, 3, 0)], ids=str
)
def test_terms_of_several_devices_are_added_per_device_first(mesh, method, places, dtype, lazy):
    values = arrays(len(places), dtype)
    terms = spread(mesh, values, places)
    total = gr.aggregate(iter(terms) if lazy else terms, method)
    assert total.device is mesh.devices[places[0]]
    wide = accumulate_dtype(values[0].dtype)
    partial = [
        reference([value.astype(wide) for value, at in zip(values, places, strict=True) if at == p],
                  method)
        for p in dict.fromkeys(places)
    ]  # fmt: skip
    with np.errstate(over="ignore"):
        wanted = reference(partial, ADD_N).astype(values[0].dtype)
    assert same(total.numpy(), wanted)
    if method == ADD_N:
        for call in (gr.add_n, gr.accumulate_n):
            assert same(call(terms).numpy(), wanted)
        with gr.replica(2):  # arrays of the host too are added on the device of the first
            mixed = gr.add_n([terms[0], values[1]])
        assert mixed.device is total.device
        assert same(mixed.numpy(), reference(values[:2], ADD_N))
    for term, value in zip(terms, values, strict=True):
        assert same(term.numpy(), value)


def test_only_partial_sums_are_transferred(mesh, monkeypatch):
    """The partial sum of a peer is read in place."""
    terms = spread(mesh, arrays(6), (0, 2, 2, 2, 1, 1))
    for peers, copies in ((False, [(2, 0)]), (True, [])):
        monkeypatch.setattr(mesh.mesh_state, "peer_access", peers)
        with mesh.journal() as journal:
            gr.add_n(terms)
        assert [(record.source, record.device) for record in journal.of("copy")] == copies
        assert journal.bytes == SIZE * 4


def test_devices_of_another_mesh_are_refused(mesh):
    with gr.open_mesh(1, backend="sim") as other:
        terms = [mesh.devices[0].upload(arrays(1)[0]), other.devices[0].upload(arrays(1)[0])]
        with pytest.raises(gr.errors.DeviceMismatchError):
            gr.add_n(terms)
