"""Every backend keeps its promises about collectives (``device/README.md``)."""

from collections.abc import Iterator

import numpy as np
import pytest
from device.contract import BACKENDS_APART, FLOAT, SIZE, data, uploaded
from support.exact_data import DTYPES, FLOATS, exact_data, random_data, same
from support.meshes import refused

import gradreduce as gr
from gradreduce.device import Buffer, Mesh, accumulate_dtype, as_dtype
from gradreduce.errors import CollectiveError, DeviceMismatchError

NUM = 3
ZEROS = np.zeros(SIZE, np.float32)


@pytest.fixture(params=BACKENDS_APART)
def mesh(request) -> Iterator[Mesh]:
    """Three physical devices, and a fourth logical one beside the second."""
    with request.param([0, 1, 2, 1]) as made:
        yield made


def terms_of(dtype, size=SIZE, make=exact_data) -> list[np.ndarray]:
    return [make((size,), dtype, seed=seed) for seed in range(NUM)]


def on_each(mesh: Mesh, values) -> list[Buffer]:
    return [device.upload(value) for device, value in zip(mesh.devices, values, strict=False)]


@pytest.mark.parametrize("size", [1, SIZE])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_makes_every_buffer_the_sum(mesh, dtype, size):
    terms = terms_of(dtype, size)
    buffers = on_each(mesh, terms)
    if mesh.backend == "cuda" and dtype in ("int16", "uint16"):
        with refused(mesh, CollectiveError, f"NCCL does not support sum of {dtype}"):
            mesh.collective.all_reduce(buffers)
        return
    with mesh.journal() as journal:
        mesh.collective.all_reduce(buffers)
    wanted = terms[0] + terms[1] + terms[2]
    for buffer in buffers:
        assert same(buffer.numpy(), wanted)
    kinds = {(record.kind, record.name, record.nbytes) for record in journal.records}
    assert kinds == {("collective", "all_reduce", terms[0].nbytes)}
    assert [record.device for record in journal.records] == [0, 1, 2]
    assert (journal.launches, journal.bytes) == (0, NUM * terms[0].nbytes)


@pytest.mark.parametrize("queue", ["compute", "transfer"])
def test_a_collective_runs_on_the_queue_it_is_given(mesh, queue):
    """What it reads and writes is ordered, and its memory is not reused too early."""
    terms = terms_of(FLOAT)
    sources = on_each(mesh, terms)
    sums, rows = ([each.device.zeros((size,), FLOAT) for each in sources]
                  for size in (SIZE, NUM * SIZE))  # fmt: skip
    with mesh.journal() as journal:
        mesh.collective.all_reduce(sums, sources=sources, queue=queue)
        mesh.collective.all_gather(rows, sources, queue=queue)
        mesh.collective.broadcast(sources, 1, queue=queue)
    assert {record.queue for record in journal.records} == {queue}
    freed = [each.device.empty((SIZE,), FLOAT) for each in sources]
    mesh.collective.all_reduce(freed, sources=sums, queue=queue)
    del freed  # maybe before the work has begun
    kept = [each.device.upload(ZEROS) for each in sources for _ in range(3)]
    assert all(same(each.numpy(), ZEROS) for each in kept)
    assert all(same(each.numpy(), terms[0] + terms[1] + terms[2]) for each in sums)
    assert all(same(each.numpy(), np.concatenate(terms)) for each in rows)
    assert all(same(each.numpy(), terms[1]) for each in sources)


def test_all_reduce_reads_its_sources_and_writes_its_buffers(mesh):
    """One source is its own buffer, because each rank may be in place or not."""
    terms = terms_of(FLOAT)
    sources = on_each(mesh, terms)
    buffers = [sources[0], *(each.device.zeros((SIZE,), FLOAT) for each in sources[1:])]
    mesh.collective.all_reduce(buffers, sources=sources)
    wanted = terms[0] + terms[1] + terms[2]
    assert all(same(buffer.numpy(), wanted) for buffer in buffers)
    assert all(same(b.numpy(), a) for b, a in zip(sources[1:], terms[1:], strict=True))
    device = mesh.devices[2]
    wrong = {
        "one too few": sources[:2],
        "order": [sources[0], sources[2], sources[1]],
        "size": [*sources[:2], device.zeros((SIZE + 1,), FLOAT)],
        "dtype": [each.device.zeros((SIZE,), "int32") for each in sources],
    }
    for given in wrong.values():
        before = contents([*buffers, *given])
        with refused(mesh, CollectiveError, "all_reduce"):
            mesh.collective.all_reduce(buffers, sources=given)
        assert contents([*buffers, *given]) == before


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_simulated_collective_adds_in_mesh_order_and_rounds_once(mesh, dtype):
    terms = terms_of(dtype, make=random_data)
    buffers = on_each(mesh, terms)
    if mesh.backend != "sim":  # NCCL promises no order and no rounding
        return
    mesh.collective.all_reduce(buffers)
    wide = accumulate_dtype(dtype)
    with np.errstate(all="ignore"):
        total = (terms[0].astype(wide) + terms[1]) + terms[2]
        assert total.dtype == wide
        wanted = total.astype(dtype)
        each = ((terms[0] + terms[1]).astype(dtype) + terms[2]).astype(dtype)
    for buffer in buffers:
        assert same(buffer.numpy(), wanted)
    if wide != dtype:  # the data tells the two apart
        assert not same(wanted, each)


def test_half_precision_partial_sums_do_not_overflow(mesh):
    """60000 + 60000 - 60000 in float16: the first sum is infinite there."""
    buffers = on_each(mesh, np.array([[60000], [60000], [-60000]], np.float16))
    mesh.collective.all_reduce(buffers)
    assert buffers[0].numpy() == np.float16(60000)


def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(mesh):
    terms = terms_of(FLOAT, NUM * SIZE)
    inputs = on_each(mesh, terms)
    outputs = [each.device.zeros((SIZE,), FLOAT) for each in inputs]
    with mesh.journal() as journal:
        mesh.collective.reduce_scatter(outputs, inputs)
    parts = np.split(terms[0] + terms[1] + terms[2], NUM)
    assert all(same(each.numpy(), part) for each, part in zip(outputs, parts, strict=True))
    assert [(record.name, record.device, record.nbytes) for record in journal.records] == [
        ("reduce_scatter", rank, terms[0].nbytes) for rank in range(NUM)
    ]
    places = [each.view(rank * SIZE, (SIZE,)) for rank, each in enumerate(inputs)]
    mesh.collective.reduce_scatter(places, inputs)  # in place
    assert all(same(each.numpy(), part) for each, part in zip(places, parts, strict=True))
    for wrong in (
        outputs[:2],
        [*outputs[:2], outputs[0]],
        [each.view(0, (1,)) for each in outputs],
    ):
        with refused(mesh, CollectiveError, "reduce_scatter"):
            mesh.collective.reduce_scatter(wrong, inputs)


@pytest.mark.parametrize("root", range(NUM))
def test_reduce_gives_the_root_alone_the_sum(mesh, root):
    terms = terms_of(FLOAT)
    sources = on_each(mesh, terms)
    output = sources[root].device.zeros((SIZE,), FLOAT)
    with mesh.journal() as journal:
        mesh.collective.reduce(output, sources, root)
    assert same(output.numpy(), terms[0] + terms[1] + terms[2])
    assert all(same(buffer.numpy(), term) for buffer, term in zip(sources, terms, strict=True))
    assert [(record.name, record.device) for record in journal.records] == [
        ("reduce", rank) for rank in range(NUM)
    ]
    mesh.collective.reduce(sources[root], sources, root)  # in place
    assert same(sources[root].numpy(), terms[0] + terms[1] + terms[2])
    for wrong in (sources[root - 1], output.view(0, (1,))):
        with refused(mesh, CollectiveError, "the outputs .* must have size"):
            mesh.collective.reduce(wrong, sources, root)
    before = contents(sources)
    for wrong in (-1, NUM):
        with refused(mesh, CollectiveError, f"reduce: root={wrong} must be from 0 to 2"):
            mesh.collective.reduce(output, sources, wrong)
        with refused(mesh, CollectiveError, f"broadcast: root={wrong} must be from 0 to 2"):
            mesh.collective.broadcast(sources, wrong)
    assert contents(sources) == before


def test_a_collective_waits_for_what_it_reads_and_writes():
    """It reads what another device writes, and then writes what another device reads."""
    for seed in range(16):
        with gr.open_mesh((0, 1, 2), backend="sim", schedule_seed=seed, strict=True) as mesh:
            terms = terms_of(FLOAT)
            first, second, third = on_each(mesh, terms)
            sums = [device.zeros((SIZE,), FLOAT) for device in mesh[:2]]
            copied = mesh[2].empty((SIZE,), FLOAT)
            mesh[2].copy(second, third)
            mesh.collective.all_reduce(sums, sources=[first, second])
            for _ in range(8):  # so that the copy is late
                uploaded(mesh[2], 5)
            mesh[2].copy(copied, first)
            mesh.collective.broadcast([first, second], 1)
            mesh[0].synchronize()
            assert same(copied.numpy(), terms[0])
            assert all(same(each.numpy(), terms[0] + terms[2]) for each in sums)
            assert same(first.numpy(), terms[2])


@pytest.mark.parametrize("root", range(NUM))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast_makes_every_buffer_the_root(mesh, dtype, root):
    terms = terms_of(dtype)
    buffers = on_each(mesh, terms)
    mesh.collective.broadcast(buffers, root)
    for buffer in buffers:
        assert same(buffer.numpy(), terms[root])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_gather_concatenates_the_inputs(mesh, dtype):
    terms = terms_of(dtype)
    inputs = on_each(mesh, terms)
    outputs = [buffer.device.empty((NUM, SIZE), dtype) for buffer in inputs]
    mesh.collective.all_gather(outputs, inputs)
    for output, buffer, term in zip(outputs, inputs, terms, strict=True):
        assert same(output.numpy(), np.stack(terms))
        assert same(buffer.numpy(), term)
    parts = [output.view(place * SIZE, (SIZE,)) for place, output in enumerate(outputs)]
    for output, part, term in zip(outputs, parts, terms, strict=True):
        output.device.fill_zero(output)
        part.device.upload(term, out=part)
    mesh.collective.all_gather(outputs, parts)  # may write where it reads
    assert all(same(output.numpy(), np.stack(terms)) for output in outputs)


def test_some_devices_of_a_mesh_are_enough(mesh):
    alone = uploaded(mesh.devices[2], 1)
    mesh.collective.all_reduce([alone])
    assert same(alone.numpy(), data((SIZE,), seed=1))
    pair = [uploaded(mesh.devices[3], 1), uploaded(mesh.devices[0], 2)]
    mesh[[3, 0]].collective.all_reduce(pair)
    for buffer in pair:
        assert same(buffer.numpy(), data((SIZE,), seed=1) + data((SIZE,), seed=2))


def test_calls_in_a_group_are_all_done_when_it_ends(mesh):
    """Of buffers whose sizes agree; their shapes need not."""
    terms = [data(shape, seed=seed) for seed, shape in enumerate([(2, 6), (12,), (4, 3)])]
    sums, copies = on_each(mesh, terms), on_each(mesh, terms)
    with mesh.collective.group():
        mesh.collective.all_reduce(sums)
        mesh.collective.broadcast(copies, 2)
    wanted = sum(term.reshape(-1) for term in terms)
    for total, copied in zip(sums, copies, strict=True):
        assert same(total.numpy(), wanted.reshape(total.shape))
        assert same(copied.numpy(), terms[2].reshape(copied.shape))


def read_only(mesh: Mesh, place: int) -> Buffer:
    values = data((SIZE,), seed=place)
    values.flags.writeable = False
    return mesh.devices[place].adopt(values)


def faulty(mesh: Mesh) -> dict[str, list[Buffer]]:
    """Lists of buffers that every collective must refuse."""
    first, second, third, beside = (uploaded(mesh.devices[place], place) for place in range(4))
    short = uploaded(mesh.devices[2], 2, (SIZE - 1,))
    integers = uploaded(mesh.devices[2], 2, dtype=as_dtype("int32"))
    return {
        "no buffer": [],
        "one device twice": [first, second, first],
        "one physical device twice": [first, second, third, beside],
        "sizes": [first, second, short],
        "dtypes": [first, second, integers],
    }


def contents(buffers: list[Buffer]) -> list[bytes]:
    return [buffer.numpy().tobytes() for buffer in buffers]


@pytest.mark.parametrize("fault", ["no buffer", "one device twice", "one physical device twice",
                                   "sizes", "dtypes"])  # fmt: skip
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather"])
def test_buffers_that_do_not_agree_change_nothing(mesh, name, fault):
    buffers = faulty(mesh)[fault]
    outputs = [buffer.device.zeros((NUM * SIZE,), FLOAT) for buffer in buffers]
    calls = {
        "all_reduce": lambda: mesh.collective.all_reduce(buffers),
        "broadcast": lambda: mesh.collective.broadcast(buffers, 0),
        "all_gather": lambda: mesh.collective.all_gather(outputs, buffers),
    }
    before = contents(buffers + outputs)
    with refused(mesh, CollectiveError, name):
        calls[name]()
    assert contents(buffers + outputs) == before


def test_all_gather_checks_its_outputs(mesh):
    inputs = on_each(mesh, terms_of(FLOAT))
    good = [buffer.device.zeros((NUM * SIZE,), FLOAT) for buffer in inputs]
    device = mesh.devices[2]
    wrong = {
        "one too few": good[:2],
        "order": [good[0], good[2], good[1]],
        "size": [*good[:2], device.zeros((NUM * SIZE + 1,), FLOAT)],
        "dtype": [*good[:2], device.zeros((NUM * SIZE,), "int32")],
        "beside": [good[0], mesh.devices[3].zeros((NUM * SIZE,), FLOAT), good[2]],
    }
    for outputs in wrong.values():
        before = contents(outputs)
        with refused(mesh, CollectiveError, "all_gather"):
            mesh.collective.all_gather(outputs, inputs)
        assert contents(outputs) == before


def test_a_read_only_buffer_may_be_read_and_not_written(mesh):
    if mesh.backend != "sim":  # only NumPy has read-only arrays
        return
    fixed = read_only(mesh, 0)
    buffers = [fixed, *(uploaded(mesh.devices[place], place) for place in (1, 2))]
    before = contents(buffers)
    outputs = [buffer.device.zeros((NUM * SIZE,), FLOAT) for buffer in buffers]
    small = [buffer.view(0, (1,)) for buffer in buffers[1:]]
    calls = [
        lambda: mesh.collective.all_reduce(buffers),
        lambda: mesh.collective.broadcast(buffers, 1),
        lambda: mesh.collective.all_gather([fixed.view(0, (3,)), *outputs[1:]], [fixed, *small]),
        lambda: mesh.collective.all_gather(
            [fixed.view(0, (2,)), buffers[1].view(0, (2,))], [outputs[0].view(0, (1,)), small[0]]
        ),
    ]
    for call in calls:
        with mesh.journal() as journal, pytest.raises(CollectiveError):
            call()
        assert journal.records == []
    assert contents(buffers) == before
    mesh.collective.all_gather(outputs, buffers)
    mesh.collective.broadcast(buffers, 0)
    assert contents(buffers) == [before[0]] * NUM


def test_buffers_of_two_meshes_change_nothing(reopen_two_gpus):
    with reopen_two_gpus([0, 1]) as mesh, reopen_two_gpus([0, 1]) as other:
        buffers = [uploaded(mesh.devices[0], 1), uploaded(other.devices[1], 2)]
        before = contents(buffers)
        outputs = [buffer.device.zeros((2 * SIZE,), FLOAT) for buffer in buffers]
        for call in (
            lambda: mesh.collective.all_reduce(buffers),
            lambda: mesh.collective.broadcast(buffers, 0),
            lambda: mesh.collective.all_gather(outputs, buffers),
        ):
            with refused(mesh, DeviceMismatchError, "buffer 1"):
                call()
        assert contents(buffers) == before
