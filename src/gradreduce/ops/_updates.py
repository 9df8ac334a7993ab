"""What every update rule shares: its launcher, and its twin in blocks; knows no formula.

Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradreduce.device import Buffer, Device, Kernel, Queue, Writer, accumulate_dtype
from gradreduce.device.kernel import Arrays

from ._check import check_rows, check_writable
from ._templates import FLOATS, UPDATES

__all__ = ["Update", "prepare_rule", "run_rule", "update", "update_fitted"]

# The operands of one tensor: the variable, a float; its master, if it has one; the slots of the
# rule; the gradient, which is only read. They are of one size, and none overlaps another. The
# gradient has the dtype of the variable, and so have the slots. A master is the float32 of which a
# half is the rounded value; then the slots are float32 too. One that does not round to its variable
# is overwritten, not used: the variable was assigned to.
Update = Sequence[Buffer]
# A rule on arrays of one block: the variable, the slots and the gradient, scratch, scalars. Changes
# the first two in place.
Step = Callable[..., None]

# Elements of a block; as many as the simulation cuts a launch into. SGD, momentum and Adam over 16M
# float32 in 50 variables, best of 12 in turns on two busy cores, 2026-11: 2^15 10.3, 15.5, 34.2 ms,
# 2^16 9.6, 14.3, 31.4, 2^17 7.8, 12.7, 29.8; NumPy's own SGD in blocks of 2^15 8.7.
BLOCK_SIZE = 1 << 17
# Rows below this are put side by side: a NumPy call for each of them takes longer than the copies.
SMALL_SIZE = 1 << 11


def run_rule(
    table: Sequence[Arrays],
    num_slots: int,
    step: Step,
    num_scratch: int,
    scalars: Sequence[float],
) -> None:
    """The twin of an update: ``step`` over every row, in blocks, in the accumulate type.

    Args:
        table: the rows of a launch.
        num_slots: of the rule.
        step: ``step(var, *slots, grad, *scratch, *scalars)``, arrays of one length and numbers,
            all in the accumulate type.
        num_scratch: arrays that ``step`` wants beside them; they hold anything.
        scalars: cast to the accumulate type.
    """
    if not table:
        return
    dtype, num_operands = table[0][0].dtype, len(table[0])
    wide = accumulate_dtype(dtype)
    given = [wide.type(scalar) for scalar in scalars]
    blocks = _blocks(table)
    size = max([length for _, length in blocks])
    scratch = np.empty((num_scratch, size), wide)
    copies: np.ndarray | None = None
    for rows, length in blocks:
        spare = [array[:length] for array in scratch]
        if dtype == wide and len(rows) == 1:
            step(*rows[0], *spare, *given)
            continue
        if copies is None:
            copies = np.empty((num_operands, size), wide)
        work = [array[:length] for array in copies]
        for place, array in enumerate(work):
            np.concatenate([row[place] for row in rows], out=array)
        master = work.pop(1) if num_operands == num_slots + 3 else None
        if master is not None:
            np.copyto(work[0], master, where=master.astype(dtype).astype(wide) == work[0])
        step(*work, *spare, *given)
        if master is not None:
            work.insert(1, work[0])
        _put_back(rows, work[:-1])


def _put_back(rows: Sequence[Arrays], work: Sequence[np.ndarray]) -> None:
    """What was worked on side by side, into the operands that are written."""
    for place, array in enumerate(work):
        start = 0
        for row in rows:
            end = start + row[place].size
            row[place][...] = array[start:end]
            start = end


def _blocks(table: Sequence[Arrays]) -> list[tuple[list[Arrays], int]]:
    """Rows, or parts of rows, that are worked on at once, and their size; small ones together."""
    blocks: list[tuple[list[Arrays], int]] = []
    small: list[Arrays] = []
    length = 0
    for row in table:
        size = row[0].size
        if size < SMALL_SIZE:
            if length + size > BLOCK_SIZE:
                blocks.append((small, length))
                small, length = [], 0
            small.append(row)
            length += size
        elif size <= BLOCK_SIZE:
            blocks.append(([row], size))
        else:
            for start in range(0, size, BLOCK_SIZE):
                part = [operand[start : start + BLOCK_SIZE] for operand in row]
                blocks.append(([part], part[0].size))
    if small:
        blocks.append((small, length))
    return blocks


def update(
    kernel: Kernel,
    rows: Sequence[Update],
    num_slots: int,
    scalars: Sequence[float],
    device: Device | None,
    queue: Queue,
) -> None:
    """One launch of a rule for each dtype; see the launchers.

    Raises:
        ValueError: what ``Update`` says does not hold.
    """
    for row in rows:
        if len(row) not in (num_slots + 2, num_slots + 3):
            raise ValueError(
                f"{kernel.name}: a row of {len(row)} operands: a variable, {num_slots} slots and "
                "a gradient are needed, and at most a master"
            )
    for launched in _alike(rows):
        has_master = len(launched[0]) == num_slots + 3
        _check_template(kernel, launched[0], has_master)
        num_written = len(launched[0]) - 1
        leaders = [0, *[int(has_master)] * (num_written - 1), 0]
        # All as if they were written: a rule that reads what it has written is another rule.
        check_rows(kernel.name, launched, num_written + 1, leaders=leaders)
        for place in range(num_written):
            check_writable(kernel.name, [row[place] for row in launched])
    if rows:
        update_fitted(kernel, rows, scalars, device or rows[0][0].device, queue)


def update_fitted(
    kernel: Kernel,
    rows: Sequence[Update],
    scalars: Sequence[float],
    device: Device,
    queue: Queue = "compute",
    *,
    writer: Writer | None = None,
) -> None:
    """As ``update``, of rows that fit by their making: not looked at.

    A ``writer`` of what they write says that they are of the same dtypes, and on ``device``'s
    compute queue; it launches faster.
    """
    for launched in [rows] if writer is not None else _alike(rows):
        first = launched[0]
        template = (first[0].dtype.name, first[1 if len(first) > 2 else 0].dtype.name)
        given = (len(first) - 1, *map(float, scalars))
        if writer is None:
            device.launch(kernel, template, launched, given, queue=queue)
        else:
            writer.launch(kernel, template, launched, given)


def _alike(rows: Sequence[Update]) -> list[list[Update]]:
    """Those that one launch serves, together: of the same dtypes, and all with a master or none."""
    if len({(id(row[0].dtype), id(row[1].dtype), len(row)) for row in rows}) == 1:
        return [list(rows)]
    groups: dict[tuple[int, int, int], list[Update]] = {}  # by id: hashing a dtype is slow
    for row in rows:
        groups.setdefault((id(row[0].dtype), id(row[1].dtype), len(row)), []).append(row)
    return list(groups.values())


def prepare_rule(kernel: Kernel, device: Device, dtype: np.dtype, state: np.dtype) -> None:
    """Compiles what a rule launches for variables of one dtype and slots of another."""
    device.prepare(kernel, (dtype.name, state.name))


def _check_template(kernel: Kernel, row: Update, has_master: bool) -> None:
    found = (row[0].dtype.name, row[int(has_master)].dtype.name)
    if found[0] not in FLOATS:
        raise ValueError(f"{kernel.name}: {row[0]} is not of a float dtype: {', '.join(FLOATS)}")
    if has_master and (found[0] == found[1] or found not in UPDATES):
        raise ValueError(f"{kernel.name}: {row[1]} is no float32 master of a half, as {row[0]}")
