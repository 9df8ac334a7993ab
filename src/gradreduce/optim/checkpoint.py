"""The state of an optimizer: hyperparameters and slots, and checkpoints of them.

See ``gradreduce.checkpoint``.

Float16 and bfloat16 slots are saved as float32. Hyperparameters that are callables or Variables are
saved as None. A load does not replace hyperparameters that are None in the state, or callables or
Variables in the optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gradreduce import checkpoint, ops
from gradreduce.arrays.convert import cast_array, is_array
from gradreduce.arrays.variable import Variable
from gradreduce.checkpoint import (
    StateEntry,
    StateTable,
    array,
    by_name,
    constant,
    downloader,
    equal,
    flag,
    optional,
    plain,
    some_of,
    validate_state,
)
from gradreduce.comm.description import digest_of
from gradreduce.device import Buffer, accumulate_dtype, as_deadline, group_by
from gradreduce.errors import NotCopied, brief, listed, log_warning

from .hyperparameters import History, Number, as_number, no_attribute, text_of, value_of
from .slots import Slots


def slots_table(slots: Slots, owners: Mapping[str, Variable]) -> StateTable:
    """Returns the table of slots. Any of these variables may have some in the state to load."""
    schemas = {
        name: dict.fromkeys(slots.names_for(var), array(var.shape, slots.state_dtype(var)))
        for name, var in owners.items()
    }
    return StateTable(
        optimizer=constant(slots.kind.__name__),
        slots=StateEntry(
            partial(_queue_slots, slots),
            some_of(schemas),
            lambda values: ready_slots(
                slots, {owners[name]: each for name, each in values.items()}
            ),
        ),
    )


def _queue_slots(slots: Slots) -> dict[str, Any]:
    by_name(var for by_variable in slots.by_name.values() for var in by_variable)
    copies: dict[str, Any] = {}
    for name, by_variable in slots.by_name.items():
        for var, slot in by_variable.items():
            copies.setdefault(var.name, {})[name] = checkpoint.queue_copy(slot.buffers[0])
    return copies


def queue_fingerprints(slots: Slots) -> dict[str, Any]:
    """Queues fingerprints of the values of variables that have slots and no name.

    If another program makes variables in another order, they have each other's names. The first
    call that finds some whose slots could be exchanged logs a warning.
    """
    owners = {var.name: var for by_variable in slots.by_name.values() for var in by_variable}
    alike = [name for names in _alike(owners) for name in names]
    if alike and not slots.has_warned:
        slots.has_warned = True
        log_warning(
            "gradreduce.checkpoint",
            "the state of %s has slots of Variables without a name whose slots are alike: %s. "
            "They are numbered as they are made, and a program that makes them in another order "
            "would exchange their slots: give each a name",
            slots.owner, listed(alike),
        )  # fmt: skip
    return {name: _queue_fingerprint(owners[name]) for name in checkpoint.select_numbered(owners)}


def check_fingerprints(
    where: str, saved: Mapping[str, Any], owners: Mapping[str, Variable]
) -> None:
    """Raises if variables have the values that the state has of each other.

    Other values are accepted: the variables may be loaded later.

    Args:
        where: the name of the entry, for the error.
        saved: the validated entry.
        owners: variables by name: those of ``saved``, and others, which may have the values too.

    Raises:
        ValueError: variables whose slots are alike have all of the saved values, in another order.
    """
    for names in _alike(owners):
        saved_digests = {name: saved[name] for name in names if name in saved}
        if not saved_digests:
            continue
        digests = {name: _queue_fingerprint(owners[name])(Buffer.numpy) for name in names}
        wrong = [name for name, value in saved_digests.items() if digests[name] != value]
        if wrong and not Counter(saved_digests.values()) - Counter(digests.values()):
            name = wrong[0]
            other = next(each for each in names if digests[each] == saved_digests[name])
            raise ValueError(
                f"{where}: the value of {other!r} is that of {name!r} in the state, so the slots "
                f"would be exchanged{checkpoint.NUMBERED}"
            )


def fingerprint(where: str, saved: Any) -> str:
    """Validates a saved fingerprint."""
    digest = plain(where, saved)
    if not isinstance(digest, str):
        raise TypeError(f"{where}={brief(saved)} must be a string")
    return digest


def _alike(owners: Mapping[str, Variable]) -> list[list[str]]:
    """Returns the names of Variables without a name, in groups whose saved slots are alike.

    Slots of float16 and bfloat16 are saved as float32, so they fit each other.
    """
    numbered = {name: owners[name] for name in checkpoint.select_numbered(owners)}
    groups = group_by(
        [((var.shape, accumulate_dtype(var.dtype)), name) for name, var in numbered.items()]
    )
    return [names for names in groups.values() if len(names) > 1]


def _queue_fingerprint(var: Variable) -> Callable[[Callable[[Buffer], Any]], str]:
    """Queues a copy; returns a function that returns its fingerprint, see ``downloader``."""
    copy = checkpoint.queue_copy(var.buffers[0])
    return lambda download: digest_of(cast_array(download(copy), var.dtype).tobytes())


def ready_slots(slots: Slots, values: Mapping[Variable, Mapping[str, Any]]) -> Callable[[], None]:
    """Creates slots with these values; returns a function that replaces the existing slots."""
    new_slots: dict[str, dict[Variable, Variable]] = {name: {} for name in slots.by_name}
    for var, of_var in values.items():
        for name, value in of_var.items():
            slot = new_slots[name][var] = slots.make_one(var, name)
            slot.assign(cast_array(value, slot.dtype))
    return partial(setattr, slots, "by_name", new_slots)


def _is_computed(value: Any) -> bool:
    return callable(value) or isinstance(value, Variable)


def power(where: str, saved: Any) -> float:
    """Validates a saved power of a decay."""
    return value_of(where, plain(where, saved), is_decay=True)


def number_entry(owner: Any, name: str, *, is_decay: bool) -> StateEntry:
    """Returns the entry of a hyperparameter.

    Args:
        owner: the optimizer.
        name: the attribute: a number, bool, string, callable or Variable.
        is_decay: whether the value must be at least 0 and below 1.
    """
    own = getattr(owner, name)

    def check(where: str, saved: Any) -> Any:
        value = plain(where, saved)
        if value is None or _is_computed(own):
            return own
        if isinstance(own, str):  # such as eps_mode, which is part of the rule
            return equal(own)(where, value)
        if isinstance(own, bool):
            return flag(where, value)
        return value_of(where, value, is_decay=is_decay)

    return StateEntry(
        lambda: None if _is_computed(own) else own.tolist() if is_array(own) else own,
        check,
        lambda number: partial(setattr, owner, name, number),
    )


_FORMAT = "gradreduce optimizer 3"


class OptimizerState(NotCopied):
    """The hyperparameters and slots of an optimizer, and checkpoints of them."""

    _copy_hint = "pass its state_dict(), and load that into a new one"

    #: names of the slots that the rule keeps for each variable
    _slot_names: tuple[str, ...] = ()

    def __init__(self, name: str, *, master_dtype: Any = None) -> None:
        if not name:
            raise ValueError("Must specify the optimizer name")
        if not isinstance(name, str):
            raise TypeError(f"name={brief(name)} must be a string")
        self._name = name
        names = self._slot_names if self._rule is None else self._rule.slots
        self._slots = Slots(type(self), name, names, master_dtype, self._power_names)

    def _set_numbers(self, **numbers: Number) -> None:
        """Adds hyperparameters, which become attributes that can be set."""
        self._hyperparameters += tuple(numbers)
        for name, value in numbers.items():
            setattr(self, name, as_number(name, value, is_decay=name in self._decays))

    def __setattr__(self, name: str, value: Any) -> None:
        is_known = (
            name.startswith("_")
            or hasattr(type(self), name)
            or name in (*self._hyperparameters, *self._settings)
        )
        if not is_known and type(self).__module__.startswith("gradreduce."):
            raise self._no_attribute(name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        fields = [f"{name}={text_of(getattr(self, name))}" for name in
                (*self._hyperparameters, *self._settings)]  # fmt: skip
        return f"<{type(self).__name__} {self._name!r}{' ' if fields else ''}{', '.join(fields)}>"

    _hyperparameters: tuple[str, ...] = ()  # attributes: numbers, or callables
    _settings: tuple[str, ...] = ()  # other attributes that may be set
    _constants: tuple[str, ...] = ()  # attributes that only the constructor sets

    _decays: tuple[str, ...] = ()  # hyperparameters that must be at least 0 and below 1
    _power_names: tuple[str, ...] = ()  # powers of decays, which are saved with the slots

    def _next_update(
        self, powers: tuple[float, ...]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns the scalars of the next update, and the powers after it.

        Called once per update, before any launch.

        Args:
            powers: the powers before this update; empty before the first one.
        """
        scalars = self._last_numbers = tuple(
            [
                value_of(name, getattr(self, name), is_decay=name in self._decays)
                for name in self._hyperparameters
            ]
        )
        return scalars, powers

    _last_numbers: tuple[float, ...] = ()  # the values of the hyperparameters in the last update

    def _numbers_of_schedules(self) -> dict[str, float]:
        """Returns what the last update read from callables and Variables, named for errors."""
        return {
            f"{name} of the last update": number
            for name, number in zip(self._hyperparameters, self._last_numbers, strict=False)
            if not isinstance(getattr(self, name), float)
        }

    _history = History()  # what updates over processes have read from callables and Variables

    def _settings_to_compare(self) -> dict[str, Any]:
        """Returns the settings that must be equal in all processes, as JSON values.

        A callable and a Variable are described by their kind, because reading them has effects.
        """
        settings = {"optimizer": type(self).__name__, "masters": self._slots.has_masters}
        for name in (*self._hyperparameters, *self._settings, *self._constants):
            value = getattr(self, name)
            settings[name] = "a schedule" if _is_computed(value) else value
        return settings

    def _no_attribute(self, name: str) -> AttributeError:
        """Returns the error for setting an unknown attribute."""
        known = (*self._hyperparameters, *self._settings, "cross_device_ops")
        return no_attribute(type(self).__name__, name, known)

    _rule: ops.UpdateRule | None = None  # names the kernels, used instead of ``_apply``, and slots

    def get_name(self) -> str:
        """Returns the name that was passed to the constructor."""
        return self._name

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Returns the slot ``name`` of ``var``, a Variable; None if there is none.

        Slots are created by the first update or by ``prepare``. A master is the slot ``"master"``.
        """
        return self._slots.by_name.get(name, {}).get(var)

    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots made so far, such as ``"momentum"``, sorted."""
        return sorted(name for name, slots in self._slots.by_name.items() if slots)

    def variables(self) -> list[Variable]:
        """Returns the optimizer's own Variables, its slots and masters, sorted by name."""
        return self._slots.all()

    def _check_hyperparameters(self) -> None:
        for name in self._hyperparameters:  # users may have set them to anything
            as_number(name, getattr(self, name), is_decay=name in self._decays)

    def state_dict(
        self, *, deadline: float | None = None, output_type: str = "numpy"
    ) -> dict[str, Any]:
        """Returns the state of the optimizer as host data, for a checkpoint.

        The values of the variables are not included. The call waits for the devices.

        Args:
            deadline: seconds from now; if the devices are not done by then, the mesh fails.
            output_type: see ``ConditionalAccumulator.state_dict``.

        Returns:
            A dict of new objects.

            - ``"format"``: the version of these keys.
            - ``"optimizer"``: the name of the class.
            - ``"hyperparameters"``: the attributes that can be set (``"learning_rate"``), by name.
              The value is None for callables and Variables, because your program creates them.
            - ``"powers"``: the powers of Adam's decays. None before the first update, and for other
              rules.
            - ``"slots"``: arrays by the names of the variable and of the slot, masters included.
              Float16 and bfloat16 slots are saved as float32.
            - ``"fingerprints"``: strings computed from the values of Variables without a name, by
              name. The first ``state_dict`` with two whose slots could be exchanged logs a warning:
              give them names.

        Raises:
            ValueError: two variables with slots have the same name, ``deadline`` is not a number
                above 0, ``output_type`` is unknown, or it is ``"torch"`` and PyTorch is not
                imported.

        Example:
            >>> mesh = gr.open_mesh(1, backend="sim")
            >>> w = gr.Variable(np.float32([1]), "w", device=mesh)
            >>> optimizer = gr.MomentumOptimizer(0.5, momentum=0.9)
            >>> optimizer.apply_gradients([(np.float32([2]), w)])
            >>> state = optimizer.state_dict()
            >>> state["slots"]
            {'w': {'momentum': array([2.], dtype=float32)}}
            >>> other = gr.MomentumOptimizer(0.1, momentum=0.5)
            >>> other.load_state_dict(state, [w])
            >>> other.learning_rate
            0.5
        """
        download = downloader(as_deadline(deadline), output_type)
        fingerprints = queue_fingerprints(self._slots)
        return download({**self._state_table({}).save(), "fingerprints": fingerprints})

    def load_state_dict(self, state: Mapping[str, Any], variables: Sequence[Variable]) -> None:
        """Restores a ``state_dict``, which may come from another process or backend.

        All slots are replaced. As in PyTorch, hyperparameters are replaced too: to continue with
        another learning rate, set it after the load. Hyperparameters that are callables or
        Variables, here or in the saved optimizer, are kept. The values of ``variables`` are not
        changed. On error, the optimizer is unchanged. Example: see ``state_dict``.

        Args:
            state: the ``state_dict`` of an optimizer of the same class.
            variables: a Variable, or a list of Variables: at least those with slots in ``state``.
                They are found by their names.

        Raises:
            KeyError: a key is missing or unknown, or ``state`` has slots of a variable that is not
                in ``variables``.
            TypeError: a value has a wrong type.
            ValueError: the class, format or ``eps_mode`` differs, a slot has another shape or
                dtype, two variables have the same name, a decay or power is below 0 or not below 1,
                or Variables without a name have the values that they had at ``state_dict`` in
                another order.
        """
        owners = by_name([variables] if isinstance(variables, Variable) else variables)
        for var in list(owners.values())[:1]:
            var.buffers[0].device.mesh_state.check_process()
        table = self._state_table(owners)
        values = validate_state("state", state, table)
        check_fingerprints("state['fingerprints']", values["fingerprints"], owners)
        table.ready(values)()

    def _state_table(self, owners: Mapping[str, Variable]) -> StateTable:
        """Returns the table of the state.

        Args:
            owners: for a load: the variables that may have slots in the state, by name.
        """
        slots, names = self._slots, (*self._hyperparameters, *self._settings)
        return StateTable(
            format=constant(_FORMAT),
            hyperparameters=StateTable(
                {name: number_entry(self, name, is_decay=name in self._decays) for name in names}
            ),
            powers=StateEntry(
                lambda: dict(zip(slots.power_names, slots.powers, strict=False)) or None,
                optional(dict.fromkeys(slots.power_names, power)),
                lambda powers: partial(setattr, slots, "powers", tuple((powers or {}).values())),
            ),
            **slots_table(slots, owners),
            # ``state_dict`` saves them; variables that are saved with the optimizer have none.
            fingerprints=StateEntry(dict, some_of(dict.fromkeys(owners, fingerprint))),
        )
