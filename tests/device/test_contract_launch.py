"""Every backend keeps its promises for launches, queues and journals (``device/README.md``)."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from device.contract import (
    FLOAT,
    QUEUES,
    SIZE,
    add,
    adopted,
    data,
    in_order,
    unmapped,
    uploaded,
    waits_of,
)
from support.exact_data import DTYPES, same
from support.implementations import segment_sum
from support.meshes import refused

from gradreduce.backends.sim import host_compile
from gradreduce.device import ELEMENT_OF, Buffer, Device, Record, accumulate_dtype, can_access
from gradreduce.device.order.uses import MAX_RANGES
from gradreduce.errors import DeviceMismatchError
from gradreduce.ops import plan_segments
from gradreduce.ops.add_n import ADD_N


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_launch_writes_its_first_operands_and_no_other(one_gpu_mesh, dtype, queue):
    device, other = one_gpu_mesh.devices
    terms = [uploaded(device, 1, dtype=dtype), uploaded(other, 2, dtype=dtype)]
    out = device.empty((SIZE,), dtype)
    name, lanes = ELEMENT_OF[dtype].name, ELEMENT_OF[dtype].lanes
    rows = [
        [operand.view(0, (SIZE * lanes,), ELEMENT_OF[dtype].viewed) for operand in (out, *terms)]
    ]
    with one_gpu_mesh.journal() as journal:
        device.launch(ADD_N, (name, name, 2), rows, (2,), queue=queue)
    assert journal.records == [Record("launch", "add_n", 0, queue=queue, num_rows=1)]
    one_gpu_mesh.synchronize()
    values = [data((SIZE,), dtype, seed) for seed in (1, 2)]
    wide = accumulate_dtype(dtype)
    assert same(out.numpy(), (values[0].astype(wide) + values[1].astype(wide)).astype(dtype))
    for term, value in zip(terms, values, strict=True):
        assert same(term.numpy(), value)


def test_rows_of_size_zero_are_left_out(one_gpu_mesh):
    device = one_gpu_mesh.devices[0]
    full = [device.zeros((4,), FLOAT), uploaded(device, 1, (4,)), uploaded(device, 2, (4,))]
    none = [device.empty((0,), FLOAT) for _ in range(3)]
    with one_gpu_mesh.journal() as journal:
        device.launch(ADD_N, ("float32", "float32", 2), [none, full, none], (2,))
        device.launch(ADD_N, ("float32", "float32", 2), [none, none], (2,))
        device.launch(ADD_N, ("float32", "float32", 2), [], (2,))
        device.copy(none[0], none[1])
        device.zeros((0,), FLOAT)
    assert [(record.kind, record.num_rows) for record in journal.records] == [("launch", 1)]
    assert same(full[0].numpy(), data((4,), seed=1) + data((4,), seed=2))


def test_a_row_has_the_work_that_its_kernel_says(one_gpu_mesh):
    """A row has one item for each column of a segment, also if its plan has fewer elements."""
    device = one_gpu_mesh.devices[0]
    segments = plan_segments(np.array([4, 1, 4]))
    wide, none = (uploaded(device, 1, (3, width)) for width in (5000, 0))
    out, nothing = device.zeros((5, 5000), FLOAT), device.zeros((5, 0), FLOAT)
    with one_gpu_mesh.journal() as journal:
        segment_sum([nothing, out], [none, wide], [segments] * 2, into=[segments.indices] * 2)
    assert [(record.kind, record.num_rows) for record in journal.records] == [
        ("upload", 0),
        ("launch", 1),
    ]
    rows, expected = data((3, 5000), seed=1), np.zeros((5, 5000), FLOAT)
    expected[1], expected[4] = rows[1], rows[0] + rows[2]
    assert same(out.numpy(), expected)


def test_a_launch_accesses_peers_or_raises(two_gpu_mesh):
    """Also adopted memory that is mapped for peers."""
    near, _, far = two_gpu_mesh.devices
    out = uploaded(near, 3)
    for term in (uploaded(far, 1), adopted(far, data((SIZE,), seed=1))):
        if two_gpu_mesh.mesh_state.peers(near.physical, far.physical):
            assert term.block.peer_mapped
            with two_gpu_mesh.journal() as journal:
                add(near, out, term, term)
            assert (journal.launches, journal.copies, journal.bytes) == (1, 0, 2 * term.nbytes)
            assert same(out.numpy(), 2 * data((SIZE,), seed=1))
            assert same(near.download(term), data((SIZE,), seed=1))
            continue
        for call in (lambda term=term: add(near, out, term), lambda term=term: near.download(term)):
            with refused(two_gpu_mesh, DeviceMismatchError, "no peer access"):
                call()
        assert same(out.numpy(), data((SIZE,), seed=3))


def test_a_launch_reaches_no_other_adopted_memory_elsewhere(two_gpu_mesh):
    near, beside, far = two_gpu_mesh.devices
    why = "only memory of cudaMalloc|no peer access"
    theirs, out = unmapped(adopted(far, data((SIZE,)))), uploaded(near, 3)
    for operands in ((out, theirs), (theirs, out)):
        with refused(two_gpu_mesh, DeviceMismatchError, why):
            add(near, *operands)
    assert same(out.numpy(), data((SIZE,), seed=3))
    assert same(theirs.numpy(), data((SIZE,)))
    term = unmapped(adopted(beside, data((SIZE,), seed=4)))
    add(near, out, term)
    assert same(out.numpy(), data((SIZE,), seed=4))


def test_no_call_reaches_another_mesh(reopen):
    with reopen([0, 0]) as mesh, reopen([0, 0]) as other:
        mine, theirs = uploaded(mesh.devices[0], 1), uploaded(other.devices[0], 2)
        device = mesh.devices[0]
        calls = [
            lambda: device.copy(mine, theirs),
            lambda: device.copy(theirs, mine),
            lambda: add(device, mine, theirs),
            lambda: add(device, theirs, mine),
            lambda: device.download(theirs),
            lambda: device.release(theirs),
            lambda: device.upload(data((SIZE,)), out=theirs),
        ]
        with mesh.journal() as journal, other.journal() as journal_of_other:
            for call in calls:
                with pytest.raises(DeviceMismatchError):
                    call()
        assert journal.records == journal_of_other.records == []
        assert same(mine.numpy(), data((SIZE,), seed=1))
        assert same(theirs.numpy(), data((SIZE,), seed=2))


def test_read_only_memory_enters_and_is_never_written(two_gpu_mesh):
    near, _, far = two_gpu_mesh.devices
    if two_gpu_mesh.backend != "sim":  # only NumPy has read-only arrays
        return
    values = data((SIZE,))
    values.flags.writeable = False
    fixed, other = near.adopt(values), uploaded(far, 1)
    out = uploaded(near, 3)
    add(near, out, fixed)
    assert same(out.numpy(), values)
    calls = [
        lambda: add(near, fixed, out),
        lambda: near.launch(
            ADD_N, ("float32", "float32", 1), [[out, fixed], [fixed.view(1, (4,)), out]], (1,)
        ),
        lambda: near.upload(data((SIZE,), seed=1), out=fixed),
        lambda: near.fill_zero(fixed),
        lambda: near.copy(fixed, out),
        lambda: far.copy(fixed, other, queue="transfer"),
        lambda: far.copy(fixed.view(0, (2,)), other.view(0, (2,))),
    ]
    out = uploaded(near, 3)
    for call in calls:
        with refused(two_gpu_mesh, ValueError, r"^Buffer\(.*\) is read-only: pass a copy$"):
            call()
    assert same(out.numpy(), data((SIZE,), seed=3))
    assert same(fixed.numpy(), data((SIZE,)))
    released = near.release(fixed.view(0, (3,)))
    with pytest.raises(ValueError, match="read-only"):
        released[...] = 0


def test_a_call_that_raises_changes_no_order(two_gpu_mesh, waits):
    """It queues no wait, and the next writer still waits for a copy that reads."""
    near, _, far = two_gpu_mesh.devices
    src, dst = uploaded(near, 1), far.empty((SIZE,), FLOAT)
    theirs = unmapped(adopted(far, data((SIZE,))))
    far.copy(dst, src)
    waits.clear()
    with refused(two_gpu_mesh, DeviceMismatchError, "cannot access"):
        add(near, src, src, theirs)
    assert waits == []
    add(near, src, src, src)
    assert waits == waits_of(two_gpu_mesh, [(0, "compute", 2, "compute")])


def test_any_queue_waits_for_any_mark(two_gpu_mesh):
    for giver, consumer in product(two_gpu_mesh.devices, repeat=2):
        for given, taken in product(QUEUES, repeat=2):
            mark = giver.queue_mark(given)
            assert (mark.device, mark.queue) == (giver, given)
            with two_gpu_mesh.journal() as journal:
                assert consumer.queue_wait(mark, queue=taken) is None
            assert journal.records == []
    two_gpu_mesh.synchronize()


def moved(device: Device, dst: Buffer, src: Buffer) -> None:
    """Copies; by a launch if the device can access the source."""
    if can_access(device, src):
        add(device, dst, src)
    else:
        device.copy(dst, src)


def late(device: Device) -> None:
    """Queues work, so that later work of the device runs late."""
    for seed in range(8):
        uploaded(device, seed)


WRITES = {
    "launch": lambda device, out, src, queue: add(device, out, src, queue=queue),
    "copy": lambda device, out, src, queue: device.copy(out, src, queue=queue),
    "upload": lambda device, out, src, queue: device.upload(ZEROS, out=out, queue=queue),
    "fill": lambda device, out, src, queue: device.fill_zero(out),
    "collective": lambda device, out, src, queue: device.mesh.collective.all_reduce(
        [out], sources=[src], queue=queue
    ),
}
ZEROS = np.zeros(SIZE, np.float32)


def test_every_operation_waits_for_what_it_needs(two_gpu_mesh):
    """Nobody marks a queue: reads after writes, writes after reads, and writes after writes."""
    near, _, far = two_gpu_mesh.devices
    for name, queue in product(WRITES, QUEUES):
        old, twice = uploaded(near, 1), near.empty((SIZE,), FLOAT)
        zeros, copies = near.zeros((SIZE,), FLOAT), [far.empty((SIZE,), FLOAT) for _ in range(2)]
        far.copy(copies[0], old, queue="transfer")
        late(far)
        far.copy(twice, uploaded(far, 2))
        for out in (old, twice):
            WRITES[name](near, out, zeros, queue)
        two_gpu_mesh.synchronize()
        assert same(copies[0].numpy(), data((SIZE,), seed=1)), (name, queue)
        assert same(twice.numpy(), ZEROS), (name, queue)
        near.upload(data((SIZE,)), out=twice)
        late(near)
        WRITES[name](near, twice, zeros, queue)
        moved(far, copies[1], twice)
        assert same(copies[1].numpy(), ZEROS), (name, queue)


@pytest.mark.parametrize(
    ("runner", "queue", "needed", "read_by"),
    [
        (2, "compute", [(0, "compute")], (2, "compute")),
        (2, "transfer", [(0, "compute"), (2, "compute")], (2, "transfer")),
        (0, "compute", [(2, "compute")], None),
        (0, "transfer", [(0, "compute"), (2, "compute")], (0, "transfer")),
    ],
)
def test_a_copy_waits_for_both_ends_and_the_next_writer_for_it(
    two_gpu_mesh, waits, runner, queue, needed, read_by
):
    mesh = two_gpu_mesh
    src, dst = uploaded(mesh.devices[0], 1), mesh.devices[2].empty((SIZE,), FLOAT)
    mesh.devices[runner].copy(dst, src, queue=queue)
    assert sorted(waits) == waits_of(mesh, [(runner, queue, *other) for other in needed])
    written = waits_of(mesh, [(0, "compute", *read_by)] if read_by else [])
    for write in (
        lambda: add(src.device, src, src, src),
        lambda: src.device.upload(data((SIZE,)), out=src),
        lambda: src.device.copy(src, uploaded(src.device, 2)),
    ):
        mesh.devices[runner].copy(dst, src, queue=queue)
        waits.clear()
        write()
        assert waits == written
        write()  # the first write is enough
        assert waits == written
        assert src.block.uses is src.device.compute  # as before another queue used it


def test_each_part_of_a_block_has_its_own_order(two_gpu_mesh, waits):
    near, _, far = two_gpu_mesh.devices
    flat, term = near.zeros((4 * SIZE,), FLOAT), uploaded(near, 1)
    first, second, third, fourth = (flat.view(place * SIZE, (SIZE,)) for place in range(4))
    before, after = (far.empty((SIZE,), FLOAT) for _ in range(2))
    for part in (first, fourth):
        far.copy(before, part)
    waits.clear()
    add(near, second, term)
    far.copy(before, first)
    assert waits == []
    rows = [[part, term] for part in (first, third, second)]
    near.launch(ADD_N, ("float32", "float32", 1), rows, (1,))
    assert waits == waits_of(two_gpu_mesh, [(0, "compute", 2, "compute")])
    far.copy(after, third)
    assert waits[1:] == waits_of(two_gpu_mesh, [(2, "compute", 0, "compute")])
    assert same(before.numpy(), ZEROS)
    assert same(after.numpy(), data((SIZE,), seed=1))


def test_a_block_in_many_parts_keeps_its_order(two_gpu_mesh, waits):
    """Beyond a number of parts they are joined: an operation may wait for more than it needs."""
    near, _, far = two_gpu_mesh.devices
    flat, zero = near.empty((100,), FLOAT), near.zeros((1,), FLOAT)
    near.upload(data((100,)), out=flat)
    copied = far.empty((100,), FLOAT)
    for place in range(100):
        far.copy(copied.view(place, (1,)), flat.view(place, (1,)), queue=QUEUES[place % 2])
    if two_gpu_mesh.mesh_state.order.is_needed:
        assert len(flat.block.uses.ranges) <= MAX_RANGES
    waits.clear()
    for place in range(100):
        add(near, flat.view(place, (1,)), zero)
    told = waits_of(two_gpu_mesh, [(0, "compute", 2, each) for each in QUEUES])
    assert sorted(set(waits)) == told
    assert len(waits) <= 2 * len(told)  # an older mark may be enough for some
    assert same(copied.numpy(), data((100,)))
    assert same(flat.numpy(), ZEROS[:100])


@pytest.mark.parametrize("queue", QUEUES)
def test_the_devices_of_a_gpu_share_its_queues(two_gpu_mesh, waits, queue):
    """What its compute queue alone uses needs no wait, whatever device it is on."""
    near, beside, _ = two_gpu_mesh.devices
    terms, out = [uploaded(near, 1), uploaded(beside, 2)], beside.empty((SIZE,), FLOAT)
    beside.copy(out, terms[0])
    add(near, out, *terms)
    add(beside, terms[0], out)
    assert waits == []
    for _ in range(2):  # the second waits no more
        add(beside, out, *terms, queue=queue)
        near.upload(data((SIZE,)), out=terms[0], queue=queue)
    expected = [(0, "transfer", 0, "compute")] if queue == "transfer" else []
    assert waits == waits_of(two_gpu_mesh, expected)


def test_a_caller_may_write_what_another_gpu_has_read(two_gpu_mesh, waits):
    """Its stream, or the host, waits for our compute queue; that queue waits for the other GPU."""
    mesh, (near, _, far) = two_gpu_mesh, two_gpu_mesh.devices
    array = near.release(uploaded(near, 1))
    theirs, ours = near.adopt(array), uploaded(near, 2)
    copies = [far.empty((SIZE,), FLOAT) for _ in range(2)]
    for copied, each, queue in zip(copies, (theirs, ours), QUEUES, strict=True):
        far.copy(copied, each, queue=queue)
    waits.clear()
    near.block_stream(None)  # as each public call does for its inputs
    assert waits == waits_of(mesh, [(0, "compute", 2, "compute")])
    waits.clear()
    shared = near.release(ours)
    assert waits == waits_of(mesh, [(0, "compute", 2, "transfer")])
    with in_order(near):
        array[...] = shared[...] = 3
    for seed, copied in enumerate(copies, 1):
        assert same(copied.numpy(), data((SIZE,), seed=seed))
    far.copy(ours, uploaded(far, 4))
    if mesh.backend == "sim":  # elsewhere an array of the backend
        assert same(near.release(ours), data((SIZE,), seed=4))


def test_memory_that_was_handed_out_counts_as_the_callers(two_gpu_mesh, waits):
    near, _, far = two_gpu_mesh.devices
    ours, copied = uploaded(near, 1), far.empty((SIZE,), FLOAT)
    array = near.release(ours)
    far.copy(copied, ours)
    waits.clear()
    near.block_stream(None)  # then the caller may write it
    assert waits == waits_of(two_gpu_mesh, [(0, "compute", 2, "compute")])
    with in_order(near):
        array[...] = 3
    assert same(copied.numpy(), data((SIZE,), seed=1))


def test_another_gpu_waits_for_what_a_caller_has_written(two_gpu_mesh, waits):
    """The compute queue waits for the caller's stream, and other queues for the compute queue."""
    near, _, far = two_gpu_mesh.devices
    theirs, copied = adopted(near, data((SIZE,), seed=1)), far.empty((SIZE,), FLOAT)
    far.copy(copied, theirs)
    waits.clear()
    # Simulated devices have no callers' streams.
    near.mesh_state.order.note_wait_for_caller(near.compute)
    for _ in range(2):  # the second waits no more
        far.copy(copied, theirs)
        assert waits == waits_of(two_gpu_mesh, [(2, "compute", 0, "compute")])
    assert same(copied.numpy(), data((SIZE,), seed=1))


def test_what_is_prepared_is_not_compiled_again(one_gpu_mesh, monkeypatch):
    device = one_gpu_mesh.devices[0]
    kernel = replace(ADD_N, templates=(("float32", "float32", 1),))  # a new one
    out, term = device.empty((SIZE,), FLOAT), uploaded(device, 1)
    with one_gpu_mesh.journal() as journal:
        device.compile_kernel(kernel, kernel.templates[0])
    assert journal.records == []

    def compiles(*_) -> None:
        raise AssertionError("a launch compiles")

    monkeypatch.setattr(host_compile, "_load", compiles)
    device.launch(kernel, kernel.templates[0], [[out, term]], (1,))
    assert same(out.numpy(), data((SIZE,), seed=1))


def test_the_journal_counts_what_was_done(two_gpu_mesh):
    near, _, far = two_gpu_mesh.devices
    with two_gpu_mesh.journal() as journal:
        first, second = uploaded(near, 1), near.zeros((SIZE,), FLOAT)
        there = far.empty((SIZE,), FLOAT)
        add(near, second, first)
        far.copy(there, second)
        there.numpy()
        two_gpu_mesh.synchronize()
    uploaded(near, 1)
    kinds = ["upload", "fill", "launch", "copy", "download", "sync", "sync", "sync"]
    assert [record.kind for record in journal.records] == kinds
    counts = (journal.launches, journal.copies, journal.uploads, journal.syncs, journal.bytes)
    assert counts == (1, 1, 1, 4, SIZE * 4)
    nbytes = [record.nbytes for record in journal.records]
    assert nbytes == [SIZE * 4, SIZE * 4, 0, SIZE * 4, SIZE * 4, 0, 0, 0]
    assert [record.device for record in journal.of("sync")] == [0, 1, 2]


def test_journals_nest_and_a_part_of_a_mesh_has_the_same(two_gpu_mesh):
    part = two_gpu_mesh[[2, 1]]
    with two_gpu_mesh.journal() as outer:
        uploaded(part.devices[0], 1)
        with part.journal() as inner, two_gpu_mesh.journal() as reference:
            uploaded(two_gpu_mesh.devices[0], 2).numpy()
        assert reference.records == inner.records
        uploaded(part.devices[1], 3)
    assert (outer.uploads, outer.syncs) == (3, 1)
    assert (inner.uploads, inner.syncs) == (1, 1)
    assert outer.records[1:3] == inner.records
    assert [record.device for record in outer.records] == [2, 0, 0, 1]


def test_the_journal_records_every_thread(one_gpu_mesh):
    start = threading.Barrier(4)

    def work(place: int) -> None:
        start.wait(timeout=30)
        for _ in range(50):
            uploaded(one_gpu_mesh.devices[place % 2], 1, (8,))

    with one_gpu_mesh.journal() as journal, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4), timeout=30))
    assert journal.uploads == 4 * 50
    assert {record.device for record in journal.records} == {0, 1}
