"""Every backend keeps its promises about lifetimes (``device/README.md``)."""

import gc
import sys
import tracemalloc
import weakref
from functools import partial

import pytest
from device.contract import (
    FLOAT,
    SIZE,
    add,
    adopted,
    calls_that_succeed,
    data,
    every_call,
    uploaded,
)
from support.exact_data import same
from support.threads import in_threads

from gradreduce.device import Buffer, Device
from gradreduce.device.run.inexact import queue_download
from gradreduce.errors import BackendUnavailableError


def overwrite(device: Device, num_buffers: int = 4) -> list[Buffer]:
    """Allocates and fills blocks of the usual size, to overwrite all memory that was freed."""
    return [device.upload(data((SIZE,), seed=99)) for _ in range(num_buffers)]


def test_memory_that_is_still_referenced_is_not_reused(one_gpu_mesh):
    device = one_gpu_mesh.devices[0]
    wanted = data((SIZE,), seed=1)
    view = uploaded(device, 1).view(2, (7,))
    released = device.release(uploaded(device, 1))
    part = device.release(uploaded(device, 1).view(1, (SIZE - 1,)))[3:]
    gc.collect()
    overwrite(device)
    assert same(view.numpy(), wanted[2:9])
    if one_gpu_mesh.backend == "sim":  # elsewhere an array of the backend
        assert same(released, wanted)
        assert same(part, wanted[4:])


def test_memory_that_another_queue_still_uses_is_not_reused(two_gpu_mesh):
    near, beside, far = two_gpu_mesh.devices
    wanted = data((SIZE,), seed=1)
    outs = [device.empty((SIZE,), FLOAT) for device in two_gpu_mesh.devices]
    for make in (uploaded, lambda device, seed: adopted(device, wanted)):
        near.copy(outs[0], make(near, 1), queue="transfer")
        source = make(near, 1)
        add(beside, outs[1], source)
        del source
        far.copy(outs[2], make(near, 1))
        kept = overwrite(near)  # the sources are freed, maybe before the work has begun
        two_gpu_mesh.synchronize()
        for out in outs:
            assert same(out.numpy(), wanted)
            out.device.upload(data((SIZE,)), out=out)
        assert len(kept) == 4


def test_a_queued_download_has_the_value_at_its_place_in_the_queue(one_gpu_mesh):
    """The host does not wait for it, and the Buffer may be dropped at once."""
    device, wanted = one_gpu_mesh.devices[0], data((SIZE,), seed=1)
    held = uploaded(device, 1)
    with one_gpu_mesh.journal() as journal:
        copies = [queue_download(uploaded(device, 1)), queue_download(held)]
        add(device, held, held, held)
        copies += [queue_download(held), queue_download(held.view(3, (7,)))]
        expected = [wanted, wanted, 2 * wanted, 2 * wanted[3:10]]
        for read, values in zip(copies, expected, strict=True):
            found = read()
            assert found is None or same(found, values)
        kept = overwrite(device)
        add(device, held, held, held)
    assert journal.syncs == 0
    names = [each.name for each in journal.records if each.kind == "download"]
    assert names == ["flags of exact sums"] * 4
    device.synchronize()
    for read, values in zip(copies, expected, strict=True):
        assert same(read(), values)
    assert len(kept) == 4


def test_a_block_is_freed_with_its_last_reference(one_gpu_mesh):
    device = one_gpu_mesh.devices[0]
    buffer = uploaded(device, 1)
    ended = weakref.ref(buffer.block)
    view = buffer.view(0, (3,)).view(1, (2,))
    released = device.release(view)
    del buffer
    assert ended() is not None
    del view
    assert ended() is not None
    del released
    assert ended() is None  # by counting references, without the collector
    assert len(device.freed) == 1
    held = device.empty((SIZE,), FLOAT)
    assert not device.freed
    assert held.size == SIZE


@pytest.mark.parametrize("by", ["another thread", "the garbage collector"])
def test_a_block_freed_by_others_returns_to_its_pool(one_gpu_mesh, by):
    device = one_gpu_mesh.devices[0]
    held: list = [uploaded(device, 1)]
    ended = weakref.ref(held[0].block)
    if by == "another thread":
        in_threads(held.clear)
    else:
        held.append(held)
        del held
        gc.collect()
    assert ended() is None
    assert len(device.freed) == 1
    device.trim()
    assert not device.freed


def test_no_python_code_runs_when_a_block_is_freed(one_gpu_mesh):
    """Ctrl-C could interrupt such code and free memory that work still uses."""
    held, seen = [uploaded(one_gpu_mesh.devices[0], 1)], []
    sys.setprofile(lambda frame, event, called: seen.append(event))
    held.clear()
    sys.setprofile(None)
    assert seen == ["c_call", "c_return", "c_call"]  # of clear and of setprofile
    assert len(one_gpu_mesh.devices[0].freed) == 1


def test_many_threads_share_a_device(one_gpu_mesh):
    """Each keeps its values, while all allocate and free memory of one size."""
    device = one_gpu_mesh.devices[0]

    def work(seed: int) -> None:
        for _ in range(30):
            out = device.empty((SIZE,), FLOAT)
            add(device, out, uploaded(device, seed), uploaded(device, seed + 1))
            assert same(out.numpy(), data((SIZE,), seed=seed) + data((SIZE,), seed=seed + 1))

    in_threads(*(partial(work, seed) for seed in (0, 10, 20, 30)))


def test_memory_does_not_grow_with_use(two_gpu_mesh):
    near, _, far = two_gpu_mesh.devices
    source, held = uploaded(near, 1), near.empty((SIZE,), FLOAT)

    def use(num_times: int) -> None:
        for turn in range(num_times):
            out = far.empty((SIZE,), FLOAT)
            far.copy(out, source, queue="transfer")
            far.copy(out, source)
            add(far, out, out, out)
            add(near, held, source, queue="transfer")
            if turn % 10 == 9:
                two_gpu_mesh.synchronize()

    def growth(num_times: int) -> int:
        before, _ = tracemalloc.get_traced_memory()
        use(num_times)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    # A leak of one object per turn, at least 16 bytes, is 4,800 bytes in every round. Objects that
    # stay once, and small blocks that NumPy caches, are fewer than 2,400 bytes in most rounds.
    use(10)
    tracemalloc.start()
    try:
        assert any(growth(300) < 300 * 8 for _ in range(10))
    finally:
        tracemalloc.stop()
    two_gpu_mesh.synchronize()
    assert not far.freed


def test_two_meshes_work_side_by_side(reopen):
    first, second = reopen([0, 0]), reopen([0, 0])
    with second:
        with first:
            both = [uploaded(mesh.devices[1], 1) for mesh in (first, second)]
            with first.journal() as journal:
                for buffer in both:
                    add(buffer.device, buffer, buffer, buffer)
            assert journal.launches == 1
            assert both[0].device.name == both[1].device.name
            del buffer, both[0]
        (kept,) = both
        add(kept.device, kept, kept, kept)
        assert same(kept.numpy(), 4 * data((SIZE,), seed=1))
        with pytest.raises(BackendUnavailableError):
            first.devices[0].empty((1,), FLOAT)


def test_no_call_works_after_close(one_gpu_mesh):
    buffer = uploaded(one_gpu_mesh.devices[0], 1)
    calls = every_call(one_gpu_mesh, buffer)
    assert calls_that_succeed(calls, "") == list(calls)
    out = one_gpu_mesh.devices[0].zeros((SIZE,), FLOAT)
    shown = one_gpu_mesh.devices[0].release(out)
    with one_gpu_mesh.journal() as journal:
        one_gpu_mesh[0:1].close()  # closing a part closes the whole
        assert calls_that_succeed(calls, "was closed") == []
        one_gpu_mesh.close()  # closing twice is allowed
        with pytest.raises(BackendUnavailableError):
            one_gpu_mesh.collective.all_gather([out], [buffer])
    assert journal.records == []
    assert (shown == 0).all()
    del buffer, calls, out, shown  # which may be freed now
    gc.collect()
