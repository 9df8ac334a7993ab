"""A center on shards of this process, without Ray: what a push costs, changes and keeps."""

import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray_actors.actor_world import load
from support.compiled_first import check_compiled_first

import gradreduce as gr
from gradreduce.optim.agn.rounds import AS_AGN

SHAPES = {"a": (3,), "b": (5, 2), "big": (200, 100)}
MORE = {"big": 1}  # launches of tensors that travel alone; the simulation does not copy them


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    with load() as found:
        yield found


def message(modules, *arrays):
    return modules.messages.Layout(modules.messages.specs_of(arrays)).message(arrays)


def first_array(modules, answer):
    return modules.messages.Layout.of(answer.form).arrays(answer)[0]


def state_of(modules, optimizer):
    """The state of an actor with the variables, and a function that pushes ones to them."""
    commands, push_config = modules.commands, gr.optim.agn.push.PushConfig
    settings = modules.shard.ActorSettings("counts", 0, 1, None, 1, 0, "numpy")
    state = modules.center_state.CenterShardState(settings)
    for name, shape in SHAPES.items():
        state.run(commands.Create(name), message(modules, np.zeros(shape, np.float32)))
    state.run(modules.center.join_of(optimizer))
    scalars = tuple(getattr(optimizer, name) for name in optimizer._hyperparameters)

    def push(names):
        config = push_config(None, "w")
        command = commands.Push([names], frozenset(), config, scalars, {}, 2.0, 0)
        ones = [np.ones(SHAPES[name], np.float32) for name in names]
        return state.run(command, message(modules, *ones))

    return state, push


@pytest.mark.parametrize("names", [["a", "b"], ["a", "b", "big"]])
def test_small_tensors_are_one_upload_one_launch_and_one_download(modules, names):
    state, push = state_of(modules, gr.GradientDescentOptimizer(0.5))
    push(names)
    with state._device.mesh_state.log.journal() as journal:
        answer = push(names)
    found = Counter(record.name or record.kind for record in journal.records)
    alone = sum(MORE.get(name, 0) for name in names)
    assert found == {"upload": 1, "global_sgd": 1 + alone, "download": 1}
    for array in modules.messages.Layout.of(answer.form).arrays(answer):
        assert (array == -0.5).all()


def test_another_set_of_variables_is_planned_anew(modules):
    _, push = state_of(modules, gr.GradientDescentOptimizer(0.5))
    for names in (["a", "b"], ["b", "a"], ["b"]):
        answer = push(names)
    assert (first_array(modules, answer) == -0.75).all()


def test_a_push_after_a_load_updates_the_loaded_slots(modules):
    state, push = state_of(modules, gr.MomentumOptimizer(1.0, 1.0))
    saved = state.save()["center"]  # before the slots were made
    push(["b"])
    push(["b"])
    state.run(modules.commands.LoadCenter(saved))
    # With 0.5 twice in its momentum, the next step would be 1.5.
    assert (first_array(modules, push(["b"])) == -0.5).all()
    (slot,) = state._center.slot_variables()
    assert (slot.numpy() == 0.5).all()


def test_an_answer_that_is_not_sent_yet_does_not_change(modules):
    state, push = state_of(modules, gr.MomentumOptimizer(1.0, 1.0))
    saved = state.save()["center"]
    reads = modules.commands.Pull([["big"]]), modules.commands.SlotValue("big", "momentum")
    answers = [push(["big"]), *map(state.run, reads), push(["big"])]
    state.run(modules.commands.LoadCenter(saved))
    push(["big"])
    arrays = [first_array(modules, each) for each in answers]
    assert [array.min() for array in arrays] == [-0.5, -0.5, 0.5, -1.5]
    assert [array.max() for array in arrays] == [-0.5, -0.5, 0.5, -1.5]
    del answers, arrays
    address = state._center.variables["big"].buffers[0].address
    assert (first_array(modules, push(["big"])) == -1.5).all()
    assert state._center.variables["big"].buffers[0].address == address  # no answer has it


def test_each_command_has_one_method_that_runs_it(modules):
    def all_of(kind: type) -> set[type]:
        return {kind}.union(*map(all_of, kind.__subclasses__()))

    commands, accumulators = modules.commands, modules.accumulator_state.AccumulatorSetState
    sent = all_of(commands.ActorCommand) - {commands.ActorCommand, commands.OfWorker}
    sent -= {commands.Change, commands.Read, commands.Ask}
    in_center = set(modules.center_state.CenterShardState._handlers)
    assert in_center | set(accumulators._handlers) == sent
    assert in_center & set(accumulators._handlers) == {commands.Describe}


class Client:
    """Stands for a ``Client`` and its coordinator; the shards are in this process."""

    def __init__(self, modules: SimpleNamespace, num_shards: int, options: Any = AS_AGN) -> None:
        self._modules, self.num_shards, self._options = modules, num_shards, options
        self._round: list[tuple[Any, Any]] = []  # pushes that wait for others, and their arrays
        self._changed = threading.Condition()
        self.restart()

    def restart(self) -> None:
        """Replaces the shards by new ones, which have no snapshot."""
        settings = self._modules.shard.ActorSettings("c", 0, self.num_shards, None, 1, 0, "numpy")
        self.states = [
            self._modules.center_state.CenterShardState(
                settings._replace(shard=shard), pickle.loads(pickle.dumps(self._options))
            )
            for shard in range(self.num_shards)
        ]

    def call(self, command: Any, messages: Any = (), *options: Any) -> list[Any]:
        with self._changed:
            if not self.states[0].is_of_round(command):
                return self._run(command, [[each] for each in messages])
            self._round.append((command, messages))
            waiting = self._round
            if len(waiting) == self._options.num_required:
                self._round = []
                pushes, of_pushes = zip(*waiting, strict=True)
                self._run(
                    self._modules.commands.PushRound(pushes), list(zip(*of_pushes, strict=True))
                )
                self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._round is not waiting, 60)
            return [True]

    def _run(self, command: Any, messages: Any) -> list[Any]:
        sent = messages or [[]] * self.num_shards
        if self.states[0].may_raise(command):
            for state, each in reversed(list(zip(self.states, sent, strict=True))):
                state.check(command, *each)
        return [state.run(command, *each) for state, each in zip(self.states, sent, strict=True)]

    def read(self, command: Any) -> list[Any]:
        with self._changed:
            return [state.run(command) for state in self.states]

    def ask(self, command: Any) -> Any:
        return self.read(command)[0]


def worker_of(modules, client, names, rule):
    """A worker's optimizer that pushes at each step, and its variables."""
    device = gr.default_mesh().devices[0]
    center = gr.AGNCenter()
    center._shared = modules.center.RemoteCenter(client, center.devices, "w")
    getter = gr.AGNCustomGetter(device, center=center)
    variables = [gr.get_variable(each, np.zeros(2), custom_getter=getter) for each in names]
    return gr.AGNOptimizer(rule, 2, getter, communication_period=1), variables


def test_after_a_failure_sums_go_to_the_shards_that_now_have_the_variables(modules):
    client = Client(modules, 2)
    optimizer, variables = worker_of(modules, client, "ab", gr.GradientDescentOptimizer(1.0))
    optimizer.apply_gradients([(np.ones(2), variable) for variable in variables])
    shards = modules.commands.ListShards()
    where = [client.ask(shards)[name] for name in "ab"]
    client.restart()
    worker_of(modules, client, "ba", gr.GradientDescentOptimizer(1.0))  # another worker is first
    assert [client.ask(shards)[name] for name in "ab"] == where[::-1]
    optimizer.apply_gradients([(np.full(2, 4.0), variable) for variable in variables])
    assert [variable.numpy().tolist() for variable in variables] == [[-4.0, -4.0]] * 2


def test_a_push_is_made_although_actors_are_lost_again_before_each_try(modules, monkeypatch):
    client = Client(modules, 2)
    optimizer, variables = worker_of(modules, client, "ab", gr.GradientDescentOptimizer(1.0))
    call, restarts = client.call, iter(range(9))
    other = modules.center.RemoteCenter(client, gr.default_mesh().devices, "other")

    def restarted(command, *rest):
        if isinstance(command, modules.commands.Push) and next(restarts, None) is not None:
            client.restart()
            for name in "ab":  # another worker creates them, but does not know the rule
                other._create(name, gr.Variable(np.zeros(2), name))
        return call(command, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(client, "call", restarted)
        optimizer.apply_gradients([(np.ones(2), variable) for variable in variables])
        assert [variable.numpy().tolist() for variable in variables] == [[-1.0, -1.0]] * 2
        restarts = iter(range(99))
        with pytest.raises(modules.center_state.NotJoinedError):
            optimizer.apply_gradients([(np.ones(2), variable) for variable in variables])
        assert next(restarts) == 11
    optimizer.apply_gradients([(np.ones(2), variable) for variable in variables])
    assert [variable.numpy().tolist() for variable in variables] == [[-2.0, -2.0]] * 2


class RaisingRule(gr.Optimizer):
    """A Python rule that raises at a shard if told to."""

    _slot_names = ("total",)
    _hyperparameters = ("rate",)
    in_worker = True
    limit = 10.0

    def __init__(self, rate: float) -> None:
        super().__init__("RaisingRule")
        self.rate = rate

    def _apply(self, variable: Any, slots: dict[str, Any], gradient: Any) -> None:
        slots["total"] += gradient
        variable -= self.rate * slots["total"]
        if not self.in_worker and gradient.max() > self.limit:
            raise ArithmeticError("too large")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_python_rule_that_raises_on_one_shard_changes_none(modules, failing, monkeypatch):
    client = Client(modules, 2)
    optimizer, variables = worker_of(modules, client, "abcd", RaisingRule(0.5))
    other, others = worker_of(modules, client, "abcd", RaisingRule(0.5))

    def center() -> list[list[float]]:
        states = [each["variables"] for each in client.read(modules.commands.CenterPart())]
        return [(states[0] | states[1])[name].tolist() for name in "abcd"]

    push = client.call

    def in_actor(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(RaisingRule, "in_worker", False)
            return push(*arguments)

    monkeypatch.setattr(client, "call", in_actor)
    optimizer.apply_gradients([(np.ones(2), variable) for variable in variables])
    assert center() == [[-0.5, -0.5]] * 4
    grads = [np.full(2, 100.0 if number == failing else 2.0) for number in range(4)]
    for _ in range(2):  # the second call makes the push again
        with pytest.raises(ArithmeticError, match=r"^too large$"):
            optimizer.apply_gradients(list(zip(grads, variables, strict=True)))
        assert center() == [[-0.5, -0.5]] * 4
    other.apply_gradients([(np.ones(2), variable) for variable in others])
    assert center() == [[-1.5, -1.5]] * 4
    optimizer.get_init_op(0)()  # drops the sums that the rule does not take
    optimizer.apply_gradients([(np.ones(2), variable) for variable in variables])
    assert center() == [[-3.0, -3.0]] * 4
    assert list(client.ask(modules.commands.ListShards())) == list("abcd")
    assert [state.clock for state in client.states] == [3, 3]


def test_a_push_names_the_tasks_that_its_thread_has_registered(modules, monkeypatch):
    client, sent = Client(modules, 1), []
    optimizer, (weights,) = worker_of(modules, client, "a", gr.GradientDescentOptimizer(1.0))
    call = client.call

    def watched(command, messages=(), origin=None, *options):
        if origin is not None:
            sent.append(origin.tasks)
        return call(command, messages)

    monkeypatch.setattr(client, "call", watched)

    def step():
        optimizer.apply_gradients([(np.ones(2), weights)])

    with optimizer.make_session_run_hook(False, 3):
        step()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(step).result()
    step()
    assert sent == [(3,), (), ()]
    client.restart()
    client.states[0].register((3,))
    client.states[0].register((3,))
    assert client.ask(modules.commands.ListWorkers())[0] == [3]
    client.ask(modules.commands.End(3))
    assert client.ask(modules.commands.ListWorkers())[0] == []


@pytest.mark.parametrize("distance_scale", [None, 0.5])
@pytest.mark.parametrize(
    "rule",
    [
        lambda: gr.MomentumOptimizer(0.1, 0.9),
        lambda: gr.AdamOptimizer(master_dtype="float32"),
        lambda: RaisingRule(0.5),
    ],
    ids=["momentum", "masters", "python"],
)
@pytest.mark.parametrize("where", ["worker", "actor"])
def test_no_push_compiles_after_its_first_launch(modules, monkeypatch, where, rule, distance_scale):
    """Neither in the worker nor in the actor, which compile for themselves."""

    def calls(mesh):
        actor, worker = (mesh, other) if where == "actor" else (other, mesh)
        settings = modules.shard_state.ActorSettings
        monkeypatch.setattr(settings, "open_device", lambda self: actor.devices[0])
        center = gr.AGNCenter(worker)
        center._shared = modules.center.RemoteCenter(Client(modules, 1), worker.devices, "w")
        getter = gr.AGNCustomGetter(worker.devices[0], center=center)
        whole = np.ones((4, 3), np.float16)
        one, two = [gr.get_variable(name, whole, custom_getter=getter) for name in "ab"]
        optimizer = gr.AGNOptimizer(rule(), 1, getter, 2, distance_scale=distance_scale)
        yield
        rows = gr.IndexedSlices(whole[:2], [1, 2])
        for given in (whole, whole, rows, rows, rows, whole):
            optimizer.apply_gradients([(given, one), (whole, two)])
            yield

    with gr.open_mesh(1, backend="sim") as watched, gr.open_mesh(1, backend="sim") as other:
        check_compiled_first(watched, calls)
