"""Pointer tables: by value while they fit, then a device table that is uploaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from exact import exact_data, same
from faces import INLINE_ROWS

from gradreduce import ops
from gradreduce.device import Mesh, open_mesh, tables

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
def test_every_row_is_served(mesh, num_rows, queue):
    device = mesh.devices[0]
    values = exact_data((SIZE * num_rows,), "float32")
    term, out = device.upload(values), device.zeros(values.shape, "float32")
    device.wait(device.mark(), queue=queue)
    for _ in range(2):
        with mesh.journal() as journal:
            launch(out, term, num_rows, queue=queue)
        assert journal.launches == 1
    device.wait(device.mark(queue))
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


def test_old_tables_are_given_up(mesh, monkeypatch):
    monkeypatch.setattr(tables, "CACHED_WORDS", 2500)  # room for two of these
    device = mesh.devices[0]
    values = exact_data((SIZE * 200,), "float32")
    term, out = device.upload(values), device.zeros(values.shape, "float32")
    counts = []
    for num_rows in (198, 199, 200, 199, 198):
        with mesh.journal() as journal:
            launch(out, term, num_rows, queue="compute")
        counts.append(journal.uploads)
    assert counts == [1, 1, 1, 0, 1]
    assert len(device._tables._made) == 2
    assert same(out.numpy(), values)
