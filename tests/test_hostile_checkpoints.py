"""Checkpoint files of someone else: small ones take little memory, and change nothing if wrong."""

import io
import json
import random
import tracemalloc
import zipfile

import numpy as np
import pytest
from numpy.lib import format as npy
from support.checkpoint_cases import CASES, after_steps, bits, changed, unnamed
from support.thread_group import run_processes

import gradreduce as gr

MOST_BYTES = 10_000_000
LARGEST_FILE = 10_000
DEEP = {f"@{depth}": "[" * depth + "]" * depth for depth in (5, 60, 4000)}  # json.dumps recurses

# Headers of arrays that claim much and hold nothing.
HEADERS = [
    {"descr": "<f4", "shape": (1 << 24, 0)},
    {"descr": "<i8", "shape": (0, 1 << 40)},
    {"descr": "<i8", "shape": (1 << 40,)},
    {"descr": "|S0", "shape": (7,) * 22},
    {"descr": "|S0", "shape": (1 << 24,)},
    {"descr": [("a", "<f4", (1 << 24, 0))], "shape": ()},
    {"descr": "<f4", "shape": (1,) * 32},
    {"descr": "|O", "shape": ()},
]
VALUES = [
    10**8, 10**18, 2**63, -1, 10**400, -(10**400), 0.5, 1e308, float("inf"), float("nan"), None,
    True, "", "x" * 500, [], {}, [0] * 500, [[]], [None], *DEEP,
]  # fmt: skip


def member(array):
    """An array or a header in the format of ``np.save``."""
    file = io.BytesIO()
    if isinstance(array, dict):
        npy.write_array_header_1_0(file, {"fortran_order": False, **array})
    else:
        np.save(file, array)
    return file.getvalue()


def file_of(tensors, entries, compression=zipfile.ZIP_STORED):
    """The bytes of an ``.npz`` file with these arrays or headers, and these JSON entries."""
    text = json.dumps(entries)
    for short, deep in DEEP.items():
        text = text.replace(json.dumps(short), deep)
    with zipfile.ZipFile(file := io.BytesIO(), "w", compression) as archive:
        for name, array in {**tensors, "gradreduce": np.array(text)}.items():
            archive.writestr(f"{name}.npy", member(array))
    return file.getvalue()


def nodes(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from nodes(value[key], (*path, key))


def damaged_file(draw, state):
    """A file with a few damages: other entries, arrays that claim too much, other bytes."""
    tensors, metadata = gr.checkpoint.split(state)
    entries = json.loads(metadata["gradreduce"])
    for number in range(draw.randint(1, 3)):
        kind, value = draw.randrange(5), draw.choice(VALUES)
        if kind >= 2:
            name = f"hostile{number}"
            tensors = {**tensors, name: draw.choice([*HEADERS, *tensors.values()])}
            value = draw.choice([{"tensor": name}, [{"tensor": name}], {"a": {"tensor": name}}])
        if kind == 4 and tensors:
            tensors = {**tensors, draw.choice([*tensors]): draw.choice(HEADERS)}
        entries = changed(entries, draw.choice([*nodes(entries)]), value)
        if not isinstance(entries, dict | list):
            break
    compression = zipfile.ZIP_BZIP2 if draw.random() < 0.05 else zipfile.ZIP_DEFLATED
    content = bytearray(file_of(tensors, entries, compression))
    for _ in range(3 if draw.random() < 0.1 else 0):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content)


def read(content):
    """Joins the state of a file; None if NumPy cannot open it."""
    try:
        stored = np.load(io.BytesIO(content))
    except Exception:
        return None
    with stored:
        return gr.checkpoint.join(stored, stored)


def peak_of(call):
    """The error of a call, and the most bytes that were allocated during it."""
    error = None
    tracemalloc.start()
    try:
        call()
    except (KeyError, TypeError, ValueError) as raised:
        error = raised
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return error, peak


@pytest.fixture(params=[*CASES.values(), unnamed], ids=lambda make: make.__name__)
def case(request):
    with after_steps(request.param) as made:
        yield made


@pytest.mark.parametrize("count", [15, pytest.param(1430, marks=pytest.mark.exhaustive)])
def test_small_damaged_files_take_little_memory_and_change_nothing(case, count):
    """Over 10,000 files, for all cases together, in the long run."""
    state, draw, num_refused = case.save(), random.Random(count), 0
    before = bits(state)
    for _ in range(count):
        content = damaged_file(draw, state)
        assert len(content) < LARGEST_FILE
        error, peak = peak_of(lambda content=content: case.load(read(content)))
        assert peak < MOST_BYTES, error
        if error is None:  # the damage was harmless
            case.load(state)
        num_refused += error is not None
        assert bits(case.save()) == before
    assert num_refused > count // 2


class LooksLikeAnArray:
    """Has a dtype, but no values."""

    dtype = np.dtype("float32")


def deep(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


NUMBERS = "a number or string, or a flat list of at most 64 of them"
# An entry of SyncStep's state, a value for it, and the error.
HOSTILE = [
    ("num_skipped", np.empty((1 << 20, 0)), ValueError,
     f"state['num_skipped'] has the shape (1048576, 0); expected {NUMBERS}"),
    ("num_skipped", [0] * 65, ValueError,
     f"state['num_skipped'] has the shape (65,); expected {NUMBERS}"),
    ("num_skipped", deep(5000), ValueError,
     "state['num_skipped'][0] has the shape (1,); expected a number or string"),
    ("num_skipped", [np.empty((7,) * 7, "V0")], ValueError,
     "state['num_skipped'][0] has the shape (7, 7, 7, 7, 7, ...); expected a number or string"),
    ("num_skipped", {"a": 1}, TypeError,
     "state['num_skipped'] is a dict; expected a number, a string or a list of them"),
    ("num_skipped", LooksLikeAnArray(), TypeError,
     "state['num_skipped']: LooksLikeAnArray is not an array, a list of numbers or a Buffer"),
    ("num_skipped", np.empty((), [("a", "f4", (1 << 24, 0))]), TypeError,
     "state['num_skipped']: a structured array has no values of one type"),
    ("loss_scale", 10**400, ValueError,
     f"state['loss_scale']={gr.errors.brief(10**400)} is too large for a float"),
    ("num_replicas", 10**8, ValueError,
     "state['accumulators']['w.0']['partial_sums'] has 2 entries; expected 100000000"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "kind", "text"), HOSTILE)
def test_sizes_ranks_and_depths_are_checked_first(key, value, kind, text):
    with gr.open_mesh([0, 1], backend="sim", strict=True) as mesh:
        made = CASES["sync_step"](mesh)
        made.step(0)
        state = made.save()
        error, peak = peak_of(lambda: made.load({**state, key: value}))
        assert (type(error), *error.args) == (kind, text)
        assert peak < MOST_BYTES
        assert bits(made.save()) == bits(state)


def test_processes_refuse_a_state_that_is_nested_deeply():
    def work(group):
        with gr.open_mesh(1, backend="sim", strict=True, process_group=group) as mesh:
            made = CASES["sync_step"](mesh)
            state = made.save()
            with pytest.raises(TypeError, match="is a list; expected a dict"):
                made.load({**state, "optimizer": deep(5000)})
            made.load(state)
            return bits(made.save()) == bits(state)

    assert run_processes(2, work) == [True, True]


def test_metadata_of_someone_else_is_refused():
    with pytest.raises(ValueError) as error:
        gr.checkpoint.join({}, {"gradreduce": "[" * 1_000_000})  # Python 3.14 reads 50,000
    assert str(error.value) == (
        "metadata['gradreduce'] is nested too deeply: pass the metadata of split()"
    )
    with pytest.raises(ValueError, match=r"names .w. twice; split\(\) names each"):
        gr.checkpoint.join({"w": 1}, {"gradreduce": '[{"tensor": "w"}, {"tensor": "w"}]'})
    with pytest.raises(ValueError, match=r"metadata\['gradreduce'\] is 3: pass the metadata of"):
        gr.checkpoint.join({}, {"gradreduce": np.array(3)})


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("claims", [False, True], ids=["header", "header and zip"])
def test_an_array_of_an_npz_file_is_not_larger_than_the_file(claims, compression):
    header = {"descr": "|u1", "shape": (1 << 30,)}
    content = file_of({"w": header}, {"w": {"tensor": "w"}}, compression)
    if claims:  # both sizes in the zip's directory, too
        size = len(member(header)) + (1 << 30)
        entry = content.index(b"PK\1\2")
        content = content[: entry + 24] + size.to_bytes(4, "little") + content[entry + 28 :]
    error, peak = peak_of(lambda: read(content))
    text = "the array 'w' cannot be read: its header claims another size than the file has"
    assert (type(error), *error.args) == (ValueError, text)
    assert peak < MOST_BYTES


def test_entries_of_an_npz_file_that_share_bytes_are_refused():
    """Each would be decompressed, so a small file could take all memory."""
    content = file_of({"v": np.zeros(2), "w": np.ones(2)}, [{"tensor": "v"}, {"tensor": "w"}])
    entry = content.index(b"PK\1\2")  # whose first file now ends here
    content = content[: entry + 20] + entry.to_bytes(4, "little") + content[entry + 24 :]
    with pytest.raises(ValueError, match=r"^the entries of the file overlap$"):
        read(content)


@pytest.mark.torch
def test_tensors_that_are_larger_than_their_memory_are_refused():
    import torch

    with gr.open_mesh(1, backend="sim") as mesh:
        acc = gr.ConditionalAccumulator("float32", device=mesh)
        acc.apply_grad(np.ones(2, np.float32), 0)
        state = acc.state_dict(output_type="torch")
        wrong = {
            "the elements of the tensor share memory": torch.zeros(1).expand(1 << 23),
            "a tensor with layout torch.sparse_coo is not an array": torch.empty(
                1 << 23, layout=torch.sparse_coo
            ),
            "Cannot copy out of meta tensor": torch.empty(1 << 23, device="meta"),
        }
        for text, tensor in wrong.items():
            damaged = {**state, "sum_shape": [1 << 23], "partial_sums": [tensor]}
            error, peak = peak_of(lambda damaged=damaged: acc.load_state_dict(damaged))
            assert str(error).startswith(f"state['partial_sums'][0]: {text}")
            assert peak < MOST_BYTES
        assert bits(acc.state_dict(output_type="torch")) == bits(state)
