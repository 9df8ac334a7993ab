"""What holds here where the file calls TensorFlow's behaviour a quirk.

A table from the case to the same case with what we expect of it. A quirk that is not in the table
holds as TensorFlow has it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .runner import Case, errors_of

Change = Callable[[Case], Case]
UNIT = 4  # elements of float32 in 16 bytes


def array(data: Any, shape: list[int], dtype: str = "float32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data": data}


def row(*numbers: float, dtype: str = "float32") -> dict[str, Any]:
    return array(list(numbers), [len(numbers)], dtype)


def sparse(indices: list[int], values: list[float], dense_shape: list[int]) -> dict[str, Any]:
    """Rows of one number each."""
    return {
        "kind": "IndexedSlices",
        "indices": row(*indices, dtype="int64"),
        "values": array([[value] for value in values], [len(values), 1]),
        "dense_shape": dense_shape,
    }


def mirrored(value: Any, *devices: int) -> dict[str, Any]:
    names = [f"/cpu:{device}" for device in devices]
    return {"kind": "Mirrored", "devices": names, "values": [value] * len(names)}


def summed(num_devices: int, *total: float) -> Change:
    return gives(r=[mirrored(row(*total), *range(num_devices))])


def gives(**out: Any) -> Change:
    """Nothing raises, and this comes out."""
    return lambda case: replace(case, out=out, errors={})


def refuses(*places: int, only: tuple[int, ...] | None = None, **out: Any) -> Change:
    """These steps raise; ``only`` those are done, where the others need what was refused."""

    def change(case: Case) -> Case:
        steps = [step for step in case.steps if only is None or step[0] in only]
        errors = dict.fromkeys(places, "ValueError")
        return replace(case, steps=tuple(steps), out=out, errors=errors)

    return change


def does(*steps: dict[str, Any], refused: tuple[int, ...], **out: Any) -> Change:
    """Other steps in place of the file's."""
    errors = dict.fromkeys(refused, "ValueError")
    return lambda case: replace(case, steps=tuple(enumerate(steps)), out=out, errors=errors)


def same_as_tensorflow(case: Case) -> Case:
    """A quirk that we have too, though the file knows better; each entry says why."""
    return case


def newer(case: Case) -> Case:
    """As TensorFlow 2.21 does it."""
    assert case.newer is not None
    return replace(case, out=case.newer.get("out", {}), errors=errors_of(case.newer))


def round_trip(check: Callable[[dict[str, Any]], None] | None = None, **out: Any) -> Change:
    """What was packed comes out again as TensorFlow has it; the rest is ours."""

    def change(case: Case) -> Case:
        unpacked = case.out["r"]["unpacked"]
        return replace(case, out={"r": {"unpacked": unpacked, **out}}, errors={}, check=check)

    return change


def balanced(num_packs: int) -> Callable[[dict[str, Any]], None]:
    """The twelve elements of three tensors, in order, in so many packs equal to within 16 bytes."""

    def check(names: dict[str, Any]) -> None:
        packs, ranges = names["r"]["packs"][0], names["r"]["ranges"]
        held = [float(element) for pack in packs for element in pack]
        assert held == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 7]
        assert len(ranges) == num_packs
        assert all(len(pack) for pack in packs), "a pack is empty"
        assert all(start % UNIT == 0 for start, _ in ranges)
        sizes = [stop - start for start, stop in ranges]
        assert max(sizes) - min(sizes) <= UNIT

    return check


DENSE = array([[1.0, 1.0], [2.0, 3.0], [1.0, 1.0]], [3, 2])
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
ROWS = array([[1.0, 2.0]], [1, 2])


def remembered(*dense_shape: int) -> Change:
    """The dense_shape that came with a gradient, of which row 0 is [1, 2]."""
    slices = {"kind": "IndexedSlices", "indices": row(0, dtype="int64"), "values": ROWS}
    return gives(r={**slices, "dense_shape": list(dense_shape)})


def getter_of(*names: str, worker_device: str) -> Change:
    """The three copies of trainable variables; of collections there are none here."""
    sums = {name: f"grad_variable/{name}" for name in names}
    center = {name: f"global_center_variable/{name}" for name in names}
    devices = dict.fromkeys((*names, *sums.values()), worker_device)
    found = {"trainable_variables": list(names), "global_map": center, "grad_map": sums}
    return gives(r={**found, "devices": devices})


BETTER: dict[str, Change] = {
    "ACCN-023": refuses(0),
    "ADDN-023": gives(r=row(2050.0, dtype="float16")),
    **dict.fromkeys(("AGG-005", "AGG-105", "AGG-205", "AGG-305"),
                    gives(is_first=DENSE, dense_first=DENSE)),
    **dict.fromkeys(("AGG-008", "AGG-108", "AGG-208", "AGG-308"), gives(r=row(1.0))),
    # One inner optimizer object, and so one pair of powers: the rule of AGN is TensorFlow's.
    "AGN-006": same_as_tensorflow,
    "AGN-015": refuses(0, 2, only=(0, 2)),
    "AGN-019": getter_of("v", "w", worker_device="/job:worker/task:0"),
    "AGN-020": getter_of("w", "pv/part_0", "pv/part_1", worker_device="/cpu:0"),
    "AGN-021": gives(r=dict.fromkeys(
        ("before_grad_is_zero", "after_local_equals_global", "global_unchanged",
         "after_grad_is_zero"), True,
    )),
    "AGN-022": lambda case: replace(
        case, errors={place: error for place, error in case.errors.items() if place != 0}
    ),
    "CA-037": does(
        {"do": "create_accumulator", "as": "q", "shape": [1], "dtype": "float32"},
        {"do": "apply_grad", "on": "q", "grad": {"data": [1.5], "dtype": "float64"}},
        {"do": "apply_grad", "on": "q", "grad": {"data": [2], "dtype": "int32"}},
        {"do": "num_accumulated", "on": "q", "as": "none"},
        {"do": "apply_grad", "on": "q", "grad": {"data": [1.5], "dtype": "float64"}, "cast": True},
        {"do": "apply_grad", "on": "q", "grad": [2]},
        {"do": "take_grad", "on": "q", "num_required": 2, "as": "r"},
        refused=(1, 2), none=0, r=row(1.75),
    ),
    "CA-042": gives(r=row(60000.0, dtype="float16")),
    "CA-043": gives(r=row(683.5, dtype="float16")),
    "CA-053": refuses(1, only=(0, 1, 2, 3)),
    "CA-054": refuses(1, only=(0, 1, 2, 3, 4), n1=1, r=row(1.0)),
    "HC-013": summed(3, 60.0, 63.0),
    "HC-015": summed(5, 150.0, 155.0),
    "HC-017": summed(7, 280.0, 287.0),
    "HC-021": gives(r=mirrored(row(1.0, 2.0), 0)),
    "HC-024": gives(
        r=[mirrored(row(2052.0, dtype="float16"), 0, 1, 2, 3)],
        m=[mirrored(row(513.0, dtype="float16"), 0, 1, 2, 3)],
    ),
    "PK-002": round_trip(balanced(2)),
    "PK-004": round_trip(balanced(5)),
    "PK-005": round_trip(balanced(5)),  # of 16 bytes each: there are no more
    "PK-006": round_trip(balanced(5)),
    "PK-011": lambda case: replace(
        case, out={**case.out, "packed": case.out["unpacked"]}, errors={}
    ),
    "PK-020": gives(
        lim0={"ranges": [], "singles": list(range(10))},
        lim1={"ranges": [], "singles": list(range(10))},
        lim3={"ranges": [[0, 2], [3, 5], [6, 8]], "singles": [9]},
        lim10={"ranges": [[0, 9], [10, 12]], "singles": []},
    ),
    "PK-021": gives(
        a={"ranges": [[0, 6]], "singles": []},
        b={"ranges": [[0, 4]], "singles": []},
        c={"ranges": [], "singles": [5]},
        d={"ranges": [], "singles": []},
    ),
    "PK-034": round_trip(
        packing={f"0:{place}": pair for place, pair in enumerate(PAIRS)},
        layout=[["packing_var_placeholder"] * 4 + ["v8"]],
    ),
    "PK-035": round_trip(),
    # No size is unknown here: both tensors are small, and travel together.
    "PK-036": gives(r={"packing": {"0:0": [0, 1]}, "unpacked": [[row(1.0, 2.0), row(0.0, 1.0)]]}),
    "SCA-004": gives(r=sparse([1, 3], [3.0, 3.0], [5, 1])),
    "SCA-005": gives(r=sparse([1, 3], [16.5, 3.0], [5, 1])),
    "SCA-006": gives(r=sparse([1], [6.5], [5, 1])),
    "SCA-008": gives(r=sparse([1, 3], [5.5, 16.5], [5, 1])),
    "SCA-009": gives(r=sparse([1, 3], [5.5, 16.5], [5, 1])),
    "SCA-011": remembered(4, 2),
    "SCA-012": remembered(7, 2),
    "SCA-016": refuses(1, only=(0, 1, 2), n=0),
    "XD-006": refuses(2, 3, c=mirrored(row(30.0, 32.0), 0)),
    "XD-008": refuses(2),
    "XD-009": refuses(0, only=(0,)),
    "XD-010": refuses(0, only=(0,)),
    "XD-020": refuses(2),
    "XD-061": newer,
    "XD-062": newer,
    "XD-072": gives(r=[mirrored(row(30.0, 32.0), 0, 1), mirrored(row(30.0, 32.0), 1, 0)]),
}  # fmt: skip


def as_here(case: Case) -> Case:
    """The case with what we expect of it."""
    return BETTER.get(case.id, lambda same: same)(case)
