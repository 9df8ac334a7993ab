"""Pointer tables: by value while they fit, then a device table that is uploaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_cupy import surface
from fake_cupy.kernels import Function
from support.exact_data import exact_data, same
from support.implementations import INLINE_ROWS

from gradreduce import ops
from gradreduce.backends import open_mesh
from gradreduce.device import Mesh
from gradreduce.device.run import table as launch_table

pytestmark = pytest.mark.fake_cupy

SIZE = 8


@pytest.fixture
def mesh(new_machine) -> Iterator[Mesh]:
    new_machine(5)
    with open_mesh([0, 0], backend="cuda") as made:
        yield made


def rows_of(buffer, num_rows):
    return [buffer.view(SIZE * row, (SIZE,)) for row in range(num_rows)]


def launch(out, term, num_rows, **options):
    ops.add_n(rows_of(out, num_rows), [[row] for row in rows_of(term, num_rows)], **options)


@pytest.mark.parametrize("queue", ["compute", "transfer"])
@pytest.mark.parametrize("num_rows", [1, INLINE_ROWS, INLINE_ROWS + 1, 400])
def test_every_row_is_processed(mesh, num_rows, queue):
    device = mesh.devices[0]
    values = exact_data((SIZE * num_rows,), "float32")
    term, out = device.upload(values), device.zeros(values.shape, "float32")
    for _ in range(2):
        with mesh.journal() as journal:
            launch(out, term, num_rows, queue=queue)
        assert journal.launches == 1
    assert same(out.numpy(), values)


def test_a_large_table_is_uploaded_once_and_a_small_one_never(mesh):
    device = mesh.devices[0]
    values = exact_data((SIZE * 200,), "float32")
    term, out = device.upload(values), device.zeros(values.shape, "float32")
    counts = []
    for num_rows in (INLINE_ROWS, INLINE_ROWS + 1, INLINE_ROWS + 1, 200, 200, INLINE_ROWS + 1):
        with mesh.journal() as journal:
            launch(out, term, num_rows)
        counts.append(journal.uploads)
    assert counts == [0, 1, 0, 1, 0, 0]
    assert same(out.numpy(), values)


def test_a_thousand_inputs_are_one_launch_and_one_upload(mesh):
    device = mesh.devices[0]
    values = exact_data((1000, SIZE), "int32")
    terms, out = rows_of(device.upload(values), 1000), device.zeros((SIZE,), "int32")
    counts = []
    for _ in range(2):
        with mesh.journal() as journal:
            ops.add_n([out], [terms])
        counts.append((journal.launches, journal.uploads))
    assert counts == [(1, 1), (1, 0)]
    assert same(out.numpy(), values.sum(0, dtype="int32"))


@pytest.mark.parametrize("what", ["out", "input", "size"])
def test_a_changed_address_or_size_makes_another_table(mesh, what):
    """Each is uploaded at its first use."""
    device = mesh.devices[0]
    values = exact_data((SIZE * 200,), "float32")
    term, out = device.upload(values), device.zeros(values.shape, "float32")
    spare = device.upload(values)
    rows = [[one, other] for one, other in zip(rows_of(out, 200), rows_of(term, 200), strict=True)]
    changed = [list(row) for row in rows]
    if what == "size":
        changed[150] = [operand.view(0, (SIZE - 1,)) for operand in changed[150]]
    else:
        changed[150][what == "input"] = spare.view(SIZE * 150, (SIZE,))
    counts = []
    for table in (rows, changed, rows, changed):
        with mesh.journal() as journal:
            ops.add_n([row[0] for row in table], [row[1:] for row in table])
        counts.append(journal.uploads)
    assert counts == [1, 1, 0, 0]
    assert same(out.numpy(), values)


def test_two_devices_keep_their_own_tables(mesh):
    first, second = mesh.devices
    values = exact_data((SIZE * 200,), "float32")
    outs = []
    for device in (first, second):
        term, out = device.upload(values), device.zeros(values.shape, "float32")
        launch(out, term, 200)
        outs.append(out)
    for out in outs:
        assert same(out.numpy(), values)


def test_old_tables_are_freed(mesh, monkeypatch):
    monkeypatch.setattr(launch_table, "CACHED_WORDS", 3000)  # space for three of these
    monkeypatch.setattr(launch_table, "CACHED_TABLES", 1)
    device = mesh.devices[0]
    values = exact_data((SIZE * 200,), "float32")
    term, out = device.upload(values), device.zeros(values.shape, "float32")
    counts = []
    for num_rows in (198, 199, 198, 200, 197, 197, 198):
        with mesh.journal() as journal:
            launch(out, term, num_rows, queue="compute")
        counts.append(journal.uploads)
    assert counts == [1, 1, 0, 1, 1, 0, 1]
    assert same(out.numpy(), values)


@pytest.mark.parametrize(("threads", "block"), [(1024, 128), (1536, 192), (2048, 256)])
def test_a_launch_has_the_shape_that_the_gpu_asks_for(new_machine, monkeypatch, threads, block):
    """The largest blocks that fit its multiprocessors, smaller for little work; one per chunk."""
    attributes = {**surface.Device(0).attributes, "MaxThreadsPerMultiProcessor": threads}
    monkeypatch.setattr(surface.Device, "attributes", attributes)
    shapes, call = [], Function.__call__

    def noted(self, grid, block, *arguments, **options):
        shapes.append((grid, block))
        call(self, grid, block, *arguments, **options)

    monkeypatch.setattr(Function, "__call__", noted)
    new_machine(5)
    with open_mesh([0], backend="cuda") as made:
        device = made.devices[0]
        for size in (SIZE, 200_000):
            values = exact_data((size,), "float32")
            out = device.empty((size,), "float32")
            ops.add_n([out], [[device.upload(values)]])
            assert same(out.numpy(), values)
    chunk = 4 * 4 * block  # four vectors of four floats for each thread
    assert shapes == [((1,), (32,)), ((-(-200_000 // chunk),), (block,))]
