"""A LaunchBatch launches like its device, and checks its written operands only once."""

from __future__ import annotations

import pytest
from device.contract import FLOAT, SIZE, adopted, data, unmapped, uploaded, waits_of
from support.exact_data import same
from support.meshes import refused

from gradreduce.device import LaunchBatch, Record
from gradreduce.errors import DeviceMismatchError
from gradreduce.ops.accumulate_n import ACCUMULATE_N

TEMPLATE = ("float32", "float32")


def test_it_waits_as_a_launch_does(two_gpu_mesh, waits):
    """It waits for copies that read what it writes, and for each once."""
    near, beside, far = two_gpu_mesh.devices
    flat = near.zeros((2 * SIZE,), FLOAT)
    parts = [flat.view(place * SIZE, (SIZE,)) for place in range(2)]
    term, away = uploaded(near, 1), far.empty((SIZE,), FLOAT)
    writer = LaunchBatch(beside, [[part] for part in parts])
    for read in (None, 0, 1, None, 0):
        if read is not None:
            far.copy(away, parts[read])
        waits.clear()
        writer.launch(ACCUMULATE_N, TEMPLATE, [[part, term] for part in parts], (1,))
        told = [] if read is None else [(0, "compute", 2, "compute")]
        assert waits == waits_of(two_gpu_mesh, told)
    far.copy(term, away)
    writer.launch(ACCUMULATE_N, TEMPLATE, [[part, term] for part in parts], (1,))
    for part in parts:
        assert same(part.numpy(), 9 * data((SIZE,), seed=1))
    assert same(away.numpy(), 4 * data((SIZE,), seed=1))


def test_it_is_recorded_as_a_launch(one_gpu_mesh):
    device = one_gpu_mesh.devices[0]
    outs = [uploaded(device, 1), device.empty((0,), FLOAT), uploaded(device, 2)]
    term, none = uploaded(device, 3), device.empty((0,), FLOAT)
    for kept in ([outs[0], outs[2]], outs):  # with a row that has no work, and without
        before = [out.numpy() for out in kept]
        rows = [[out, term if out.size else none] for out in kept]
        writer = LaunchBatch(device, [[out] for out in kept])
        with one_gpu_mesh.journal() as journal:
            writer.launch(ACCUMULATE_N, TEMPLATE, rows, (1,))
        assert journal.records == [Record("launch", "accumulate_n", 0, num_rows=2)]
        for out, value in zip(kept, before, strict=True):
            assert same(out.numpy(), value + (data((SIZE,), seed=3) if out.size else 0))


@pytest.mark.parametrize("closed", [False, True])
def test_it_refuses_what_a_launch_refuses(two_gpu_mesh, closed):
    near, _, far = two_gpu_mesh.devices
    out, term = uploaded(near, 1), uploaded(near, 2)
    theirs = unmapped(adopted(far, data((SIZE,))))
    fixed = near.adopt(near.release(uploaded(near, 2)), writable=False)
    with refused(two_gpu_mesh, ValueError, "is read-only"):
        LaunchBatch(near, [[out], [fixed]])
    with refused(two_gpu_mesh, DeviceMismatchError, "only memory of cudaMalloc|no peer access"):
        LaunchBatch(near, [[out], [theirs]])
    writer = LaunchBatch(near, [[out]])
    with refused(two_gpu_mesh, DeviceMismatchError, "only memory of cudaMalloc|no peer access"):
        writer.launch(ACCUMULATE_N, TEMPLATE, [[out, theirs]], (1,))
    assert same(out.numpy(), data((SIZE,), seed=1))
    if closed:
        two_gpu_mesh.close()
    else:
        near.mark_failed("it fell off the bus")
    with pytest.raises(RuntimeError, match="closed" if closed else "fell off"):
        writer.launch(ACCUMULATE_N, TEMPLATE, [[out, term]], (1,))
