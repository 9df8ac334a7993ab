"""Update kernels: three variants of each rule, their launcher and NumPy references.

The formulas are in ``update_rules.py``, the kernels in ``update.cu``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from gradreduce.device import (
    C_TYPES,
    ELEMENT_OF,
    Arrays,
    Buffer,
    Device,
    Kernel,
    Template,
    accumulate_dtype,
    same_dtypes,
)

from .templates import UPDATES
from .update_rules import RULES, UpdateRule

# The operands of one tensor: the variable, of a float dtype; its master, if it has one; the slots
# of the rule; the extra operands of the variant; the gradient, which is only read. All have the
# same size and do not overlap. Gradient and slots have the dtype of the variable. A master is the
# float32 value from which a 16-bit variable is rounded; then the slots are float32 too. If the
# master does not round to its variable, the variable was assigned: the kernel then overwrites the
# master instead of using it.
Update = Sequence[Buffer]

Variant = Literal["plain", "local", "global"]

# The most elements of small rows in one block; the simulation splits larger rows.
BLOCK_SIZE = 1 << 17
# Rows below this size are concatenated: the copies take less time than a NumPy call for each row.
SMALL_SIZE = 1 << 11

# A function that updates one block; arguments: the operands without masters, and scratch arrays.
BlockUpdate = Callable[[Arrays, Arrays], None]
_UpdateStep = Callable[..., None]


def _plain(step: _UpdateStep, scalars: Sequence[Any], operands: Arrays, scratch: Arrays) -> None:
    step(*operands, *scratch, *scalars)


def _local(step: _UpdateStep, scalars: Sequence[Any], operands: Arrays, scratch: Arrays) -> None:
    (*changed, total, grad), (first, *others) = operands, scalars
    if first:
        np.copyto(total, grad)
    else:
        np.add(total, grad, out=total)
    step(*changed, grad, *scratch, *others)


def _global(step: _UpdateStep, scalars: Sequence[Any], operands: Arrays, scratch: Arrays) -> None:
    (*changed, copy, total), (divisor, *others), (mean, *spare) = operands, scalars, scratch
    np.true_divide(total, divisor, out=mean)
    step(*changed, mean, *(spare or scratch), *others)  # no spare: the mean may be overwritten
    np.copyto(copy, changed[0])


@dataclass(frozen=True)
class _KernelForm:
    """How a variant of a kernel differs from the rule.

    Attributes:
        block: the NumPy reference of one block.
        num_more: the number of operands between the slots and the gradient, without masters.
        lead: the names and dtypes of scalars before those of the rule.
        num_scratch: the number of scratch arrays besides those of the rule.
    """

    block: Callable[..., None]
    num_more: int = 0
    lead: tuple[tuple[str, str], ...] = ()
    num_scratch: int = 0


_FORMS: dict[Variant, _KernelForm] = {
    "plain": _KernelForm(_plain),
    # The extra operand is the sum of a period, in the accumulate dtype. first: 1 writes the
    # gradient to it, 0 adds the gradient.
    "local": _KernelForm(_local, 1, (("first", "int64"),)),
    # The extra operand is the pulled copy, with its master if the variable has one. The gradient is
    # the sum, which is divided by ``divisor``.
    "global": _KernelForm(_global, 1, (("divisor", "float64"),), 1),
}


@dataclass(frozen=True, eq=False)
class RuleKernel(Kernel):
    """A kernel that updates variables by a rule; a template over the rule's struct.

    Attributes:
        rule: the rule.
        variant: plain, local or global.
    """

    rule: UpdateRule = RULES["sgd"]
    variant: Variant = "plain"

    @property
    def num_plain(self) -> int:
        """The number of operands of a row without masters."""
        return 2 + len(self.rule.slots) + _FORMS[self.variant].num_more

    def template_of(self, row: Update) -> tuple[str, str]:
        """Returns the template arguments for a row: the dtypes of its variable and slots."""
        state = row[int(len(row) > self.num_plain)]
        # By the table, because NumPy computes the name of a dtype at each use.
        return ELEMENT_OF[row[0].dtype].name, ELEMENT_OF[state.dtype].name

    def expression(self, template: Template) -> str:
        """Returns the C++ name of one instantiation, ``update<Sgd, float, float, double>``."""
        types = [C_TYPES[str(part)] for part in template] + ["double"] * len(self.rule.scalars)
        return f"{_prefix(self.variant)}update<{', '.join([self.rule.struct, *types])}>"


def _prefix(variant: Variant) -> str:
    return "" if variant == "plain" else f"{variant}_"


def _kernel(rule: UpdateRule, variant: Variant) -> RuleKernel:
    """Creates the kernel of a rule in one variant."""
    form = _FORMS[variant]
    scalars = [("num_written", "int64"), *form.lead,
               *((name, "float64") for name in rule.scalars)]  # fmt: skip
    return RuleKernel(
        _prefix(variant) + rule.name,
        "update",
        partial(_reference, rule, form),
        tuple(scalars),
        UPDATES,
        writes="num_written",
        rule=rule,
        variant=variant,
    )


def _reference(
    rule: UpdateRule, form: _KernelForm, table: Sequence[Arrays], num_written: int, *scalars: float
) -> None:
    """Runs the NumPy reference of a rule in one variant."""
    acc_dtype = accumulate_dtype(table[0][0].dtype)
    converted = [acc_dtype.type(scalar) for scalar in scalars]
    block = partial(form.block, rule.step, converted)
    num_plain = 2 + len(rule.slots) + form.num_more
    # Without its own scratch array for the mean, more of the operands stay in the cache.
    num_more = 0 if rule.may_overwrite_grad else form.num_scratch
    run_blocks(table, num_plain, block, rule.num_scratch + num_more)


# The kernel of each rule in each variant.
RULE_KERNELS: dict[tuple[UpdateRule, Variant], RuleKernel] = {
    (rule, variant): _kernel(rule, variant) for rule in RULES.values() for variant in _FORMS
}


def run_blocks(
    table: Sequence[Arrays], num_plain: int, block: BlockUpdate, num_scratch: int
) -> None:
    """Applies ``block`` to every row, block by block, in the accumulate dtype.

    Masters replace their variables.

    Args:
        table: the rows of a launch, at least one; all operands but the last are written.
        num_plain: the number of operands of a row without masters.
        block: updates one block; called without masters.
        num_scratch: the number of uninitialized scratch arrays.
    """
    dtype, num_operands = table[0][0].dtype, len(table[0])
    acc_dtype = accumulate_dtype(dtype)
    blocks = _blocks(table)
    size = max([length for _, length in blocks])
    scratch = [*np.empty((num_scratch, size), acc_dtype)]
    copies: np.ndarray | None = None
    for rows, length in blocks:
        spare = scratch if length == size else [array[:length] for array in scratch]
        if dtype == acc_dtype and len(rows) == 1:
            block(rows[0], spare)
            continue
        if copies is None:
            copies = np.empty((num_operands, size), acc_dtype)
        work = [array[:length] for array in copies]
        columns = list(zip(*rows, strict=True))
        for column, array in zip(columns, work, strict=True):
            np.concatenate(column, out=array)
        if num_operands == num_plain:
            block(work, spare)
        else:
            _block_of_masters(work, num_plain, dtype, block, spare)
        _put_back(columns[:-1], work)


def _block_of_masters(
    work: list[np.ndarray],
    num_plain: int,
    dtype: np.dtype,
    block: BlockUpdate,
    spare: Sequence[np.ndarray],
) -> None:
    """Applies ``block`` to operands with a master after the variable and after its copy."""
    variable, master, *others = work
    unrounded = master.astype(dtype).astype(variable.dtype) == variable
    np.copyto(variable, master, where=unrounded)
    if len(work) == num_plain + 2:
        *others, copy, copy_master, total = others
        block([variable, *others, copy, total], spare)
        np.copyto(copy_master, copy)
    else:
        block([variable, *others], spare)
    np.copyto(master, variable)


def _put_back(columns: Sequence[Arrays], work: Sequence[np.ndarray]) -> None:
    """Copies a block of concatenated rows back to the operands that are written."""
    ends = list(accumulate([array.size for array in columns[0]]))
    starts = [0, *ends[:-1]]
    for column, array in zip(columns, work, strict=False):
        for out, start, end in zip(column, starts, ends, strict=True):
            out[...] = array[start:end]


def _blocks(table: Sequence[Arrays]) -> list[tuple[list[Arrays], int]]:
    """Combines small rows to blocks; returns blocks and sizes."""
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
        else:
            blocks.append(([row], size))
    if small:
        blocks.append((small, length))
    return blocks


def update_rows(
    kernel: RuleKernel,
    rows: Sequence[Update],
    scalars: Sequence[float],
    device: Device,
    *,
    are_alike: bool = False,
) -> None:
    """Launches a rule once for each dtype, without validating the rows.

    ``scalars`` are the kernel's scalar arguments after ``num_written``. ``are_alike``: the caller
    knows that all rows have the same dtypes.
    """
    for launched in [rows] if are_alike and rows else same_dtypes(rows):
        template, all_scalars = kernel.template_of(launched[0]), (len(launched[0]) - 1, *scalars)
        device.launch(kernel, template, launched, all_scalars)
