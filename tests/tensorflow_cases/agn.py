"""Steps about the AGN optimizer: several workers, one center."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import gradreduce as gr

from .encoding import decoded
from .world import AbsentError, Doing, World

SLOTS = {
    "Momentum": ("momentum",),
    "Adam": ("m", "v"),
    "Adagrad": ("accumulator",),
    "RMSProp": ("momentum", "rms"),
}
POWERS = {"Adam": {"beta1_power": "beta1", "beta2_power": "beta2"}}


@dataclass
class Worker:
    """One worker, and what it was made of."""

    getter: Any
    inner: gr.Optimizer
    optimizer: Any
    variables: dict[str, gr.Variable]


@dataclass
class Team:
    """The workers of an ``agn_setup``, and the step that they share."""

    workers: list[Worker]
    global_step: gr.Variable | None
    inner: dict[str, Any]


def _inner(written: dict[str, Any]) -> gr.Optimizer:
    arguments = dict(written)
    name = f"{arguments.pop('name')}Optimizer"
    if not hasattr(gr, name):
        raise AbsentError(f"there is no {name}")
    return getattr(gr, name)(**arguments)


def _variables(getter: Any, written: list[dict[str, Any]]) -> dict[str, gr.Variable]:
    """By name; a partitioned variable is one for each part, of its rows."""
    made = {}
    for each in written:
        array, trainable = decoded(each["init"]), each.get("trainable", True)
        parts = each.get("partitions")
        pieces = {each["name"]: array}
        if parts:
            cut = np.array_split(array, parts)
            pieces = {f"{each['name']}/part_{place}": part for place, part in enumerate(cut)}
        for name, piece in pieces.items():
            made[name] = gr.get_variable(name, piece, trainable=trainable, custom_getter=getter)
    return made


def _setup(world: World, step: dict[str, Any]) -> None:
    _inner(step["inner"])
    home, count = world.mesh.devices[0], step["num_workers"]
    shared = gr.Variable(0, "global_step", trainable=False, dtype="int64", device=home)
    team = Team([], shared if step.get("global_step", True) else None, step["inner"])
    center = gr.AGNCenter(world.mesh)
    for index in range(count):
        getter = gr.AGNCustomGetter(world.mesh.devices[index], center=center)
        variables, inner = _variables(getter, step["variables"]), _inner(step["inner"])
        optimizer = gr.AGNOptimizer(inner, count, getter, communication_period=step["period"])
        if all(each.get("no_grad") for each in step["variables"]):
            # TensorFlow builds the step here, and finds that nothing has a gradient.
            optimizer.apply_gradients([(None, variable) for variable in variables.values()])
        team.workers.append(Worker(getter, inner, optimizer, variables))
    for index, worker in enumerate(team.workers):
        is_chief = index == 0 or step.get("all_chief", False)
        with worker.optimizer.make_session_run_hook(is_chief, index):
            pass
    world.names["team"] = team


def _step(world: World, step: dict[str, Any]) -> None:
    team = world.names["team"]
    worker = team.workers[step["worker"]]
    for _ in range(step.get("times", 1)):
        pairs = [
            (world.term(step["grads"].get(name), variable.devices[0]), variable)
            for name, variable in worker.variables.items()
        ]
        worker.optimizer.apply_gradients(pairs, global_step=team.global_step)


def _read(world: World, step: dict[str, Any]) -> Any:
    team, what = world.names["team"], step["what"]
    worker, found = team.workers[step["worker"]], {}
    for name, variable in worker.variables.items():
        copies = {
            "local": variable,
            "global": worker.getter.center_variable(variable),
            "grad": worker.getter.accumulation(variable),
        }
        found.update({f"{kind}/{name}": copies[kind].numpy() for kind in what if kind in copies})
        if "slots" in what:
            for kind in ("local", "global"):
                found.update(_slots(team, worker, f"{kind}/{name}", copies[kind]))
    if "slots" in what:
        found.update(_powers(team, worker))
    if "step" in what:
        found["local_step"] = worker.optimizer.local_step.numpy()
        if team.global_step is not None:
            found["global_step"] = team.global_step.numpy()
    return found


def _slots(team: Team, worker: Worker, prefix: str, variable: gr.Variable) -> dict[str, Any]:
    """A slot that is not there yet is zero, which TensorFlow's is by then."""
    found = {}
    for name in SLOTS.get(team.inner["name"], ()):
        slot = worker.optimizer.get_slot(variable, name)
        found[f"{prefix}/{name}"] = np.zeros_like(variable) if slot is None else slot.numpy()
    return found


def _powers(team: Team, worker: Worker) -> dict[str, Any]:
    found = {}
    for name, beta in POWERS.get(team.inner["name"], {}).items():
        held = [each for each in worker.optimizer.variables() if each.name.endswith(name)]
        found[f"nonslot/{name}"] = held[0].numpy() if held else np.float32(team.inner[beta])
    return found


def _custom_getter(world: World, step: dict[str, Any]) -> Any:
    """There are no collections here; names, maps, and what lies on the worker's device."""
    worker = world.mesh.devices[1]
    getter = gr.AGNCustomGetter(worker, center=gr.AGNCenter(world.mesh))
    made = _variables(getter, step["variables"])
    trainable = {name: each for name, each in made.items() if each.trainable}
    sums = {name: getter.accumulation(each) for name, each in trainable.items()}
    near = [*trainable.values(), *sums.values()]
    return {
        "trainable_variables": list(trainable),
        "global_map": {name: getter.center_variable(v).name for name, v in trainable.items()},
        "grad_map": {name: each.name for name, each in sums.items()},
        "devices": {e.name: step["worker_device"] for e in near if e.devices == (worker,)},
    }


def _init_check(world: World, step: dict[str, Any]) -> Any:
    """The second worker of a center, whose variable starts elsewhere than the first one's."""
    center = gr.AGNCenter(world.mesh)
    getters = [gr.AGNCustomGetter(device, center=center) for device in world.mesh.devices[:2]]
    for getter, start in zip(getters, ([1.0, 2.0], [3.0, 4.0]), strict=True):
        local = _variables(getter, [{"name": "v", "init": start}])["v"]
    optimizer = gr.AGNOptimizer(gr.GradientDescentOptimizer(0.1), 2, getter)
    of_center, total = getter.center_variable(local), getter.accumulation(local)
    before = of_center.numpy()
    found = {
        "before_local_equals_global": bool((local.numpy() == before).all()),
        "before_grad_is_zero": not total.numpy().any(),
    }
    optimizer.get_init_op(1)()
    return {
        **found,
        "after_local_equals_global": bool((local.numpy() == of_center.numpy()).all()),
        "global_unchanged": bool((of_center.numpy() == before).all()),
        "after_grad_is_zero": not total.numpy().any(),
    }


def _error(world: World, step: dict[str, Any]) -> None:
    getter = gr.AGNCustomGetter(world.mesh.devices[0], center=gr.AGNCenter(world.mesh))
    foreign = gr.Variable([1.0], device=world.mesh.devices[0])
    beside = gr.AGNCustomGetter(world.mesh.devices[0], center=gr.AGNCenter(world.mesh))
    arguments = (gr.GradientDescentOptimizer(0.1), 1, getter)
    kinds: dict[str, Callable[[Any], Any]] = {
        "two_in_one_graph": lambda made: gr.AGNOptimizer(gr.AdamOptimizer(), 1, beside),
        "apply_var_not_from_getter": lambda made: made.apply_gradients([([1.0], foreign)]),
        # An init op is about the getter's variables alone: only they can be asked for.
        "init_var_not_from_getter": lambda made: getter.center_variable(foreign),
        "init_no_variables": lambda made: made.get_init_op(0),
        "empty_name": lambda made: gr.AGNOptimizer(*arguments, name=""),
        "empty_grads": lambda made: made.apply_gradients([]),
    }
    kinds[step["kind"]](gr.AGNOptimizer(*arguments))


STEPS: dict[str, Doing] = {
    "agn_setup": _setup,
    "agn_step": _step,
    "agn_read": _read,
    "agn_custom_getter": _custom_getter,
    "agn_init_check": _init_check,
    "agn_error": _error,
}
