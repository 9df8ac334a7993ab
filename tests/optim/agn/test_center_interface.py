"""Workers use a center through ``Center`` only, so that it can be in another process."""

import signal
from contextlib import nullcontext

import pytest
from optim.agn.team import KINDS, Worker, whole

import gradreduce as gr
from gradreduce.accumulator.sparse_storage import SPARSE
from gradreduce.checkpoint import downloader
from gradreduce.device import DeferInterrupts
from gradreduce.optim.agn.center_interface import Center
from gradreduce.optim.agn.local_step import rehearse_push
from gradreduce.optim.agn.push import PushedVariable, PushPlan
from gradreduce.optim.agn.variables import LazyVariable
from gradreduce.optim.slots import MASTER

STARTS = {
    "table": whole((6, 3)),
    "half": whole((7,), "float16", 1),
    "sparse half": whole((6, 2), "float16", 2),
    "wide": whole((4,), "float64", 3),
}


@pytest.fixture
def meshes():
    """Devices of workers, and other devices of the center."""
    with gr.open_mesh(4, backend="sim") as here, gr.open_mesh(2, backend="sim") as there:
        yield here, there


class HostCenter(Center):
    """A center on other devices, which exchanges only host arrays with workers."""

    def __init__(self, devices, state, *, scratch):
        self.devices, self.registry = devices, state.registry
        self.state, self.scratch = state, scratch
        self.theirs, self.is_stopped = {}, False

    def _shown(self, variable):
        home = self.devices[0]
        shown = LazyVariable(variable.name, (home,), lambda: (home.upload(variable.numpy()),))
        self.theirs[shown] = variable
        return shown

    def variable_for(self, name, local):
        value = gr.Variable(local.numpy(), name, device=self.state.devices[0])
        return self._shown(self.state.variable_for(name, value))

    def join(self, optimizer):
        self.state.join(optimizer)

    def slot(self, variable, name):
        found = self.state.slot(self.theirs.get(variable), name)
        return None if found is None else self._shown(found)

    def slot_variables(self):
        return [self._shown(slot) for slot in self.state.slot_variables()]

    def set_up_push(self, optimizer, variables, of, config):
        centers = [self.theirs[variables.center_of(var)] for var in of]
        rehearse_push(optimizer, centers, config, sparse=False)
        self.state.make_slots(optimizer, centers)

    def list_written_buffers(self, variables):
        return []

    def push_scope(self):
        return nullcontext()

    def push(self, optimizer, variables, config, scalars, then):
        if self.is_stopped:
            signal.raise_signal(signal.SIGINT)
        download, message = downloader(None), []
        for var, total in variables.sums.items():
            sent = total[0].numpy() if isinstance(total, tuple) else download(SPARSE.save(total))
            then_there = None if config.gamma is None else variables.pulled[var].numpy()
            message.append((var.name, self.theirs[variables.centers[var]], sent, then_there))
        values = self._pushed(optimizer, config, scalars, message)
        with DeferInterrupts():
            for var, (value, *master) in zip(variables.sums, values, strict=True):
                var.assign(value)
                if master:
                    optimizer.get_slot(var, MASTER).assign(*master)
            then()

    def _pushed(self, optimizer, config, scalars, message):
        """The push on the center's devices; returns the values of variables and masters."""
        with self.state.lock:
            self.state.check_usable()
            centers = [center for _, center, *_ in message]
            rows = self.state.make_slots(optimizer, centers)
            pushed, results = [], []
            for written, (name, center, sent, then) in zip(rows, message, strict=True):
                device = center.devices[0]
                total = (
                    SPARSE.load(name, sent, center.dtype, center.shape, 2**63 - 1)(device)
                    if isinstance(sent, dict)
                    else (device.upload(sent),)
                )
                values = written[: 1 + (self.state.slot(center, MASTER) is not None)]
                if self.scratch:
                    values = [device.empty(each.shape, each.dtype) for each in values]
                then = None if then is None else device.upload(then)
                pulled = [values] if self.scratch else []
                pushed.append(PushedVariable(name, written, total, pulled, then))
                results.append(values)
            PushPlan(pushed, optimizer, config, self._failed).run(scalars, lambda: None)
            return [[buffer.numpy() for buffer in values] for values in results]

    def _failed(self, error):
        self.state.mark_push_failed("there", error)

    def pull(self, optimizer, variables, then):
        with DeferInterrupts(), self.state.lock:
            self.state.check_usable()
            for local, center in variables.centers.items():
                local.assign(self.theirs[center].numpy())
                optimizer._slots.update_master(local)
                theirs = self.state.slot(self.theirs[center], MASTER)
                mine = optimizer.get_slot(local, MASTER)
                if theirs is not None and mine is not None:
                    mine.assign(theirs.numpy())
            then()


class HostAGNCenter(gr.AGNCenter):
    def __init__(self, mesh, home, *, scratch=False):
        self.devices = mesh.devices
        self._shared = HostCenter(self.devices, home._shared, scratch=scratch)
        self.state_dict, self.load_state_dict = home.state_dict, home.load_state_dict


def gradients(seed):
    grads = {name: whole(value.shape, value.dtype, seed + at)
             for at, (name, value) in enumerate(STARTS.items())}  # fmt: skip
    if seed % 3 == 0:
        del grads["wide"]
    for name in ("table", "sparse half") if seed % 4 < 2 else ("sparse half",):
        grads[name] = gr.IndexedSlices(grads[name][:3], [4, seed % 6, 4])
    return grads


def trained(mesh, center, kind, **options):
    """Two workers, with two replicas and with one; returns the complete state as bytes."""
    options = {"period": 3, **options}
    team = [
        Worker(home, center, STARTS, lambda: KINDS[kind][1](master_dtype="float32"), 2, **options)
        for home in (mesh[[0, 1]], mesh.devices[3])
    ]
    for turn in range(9):
        if turn == 5:
            with team[1].optimizer.make_session_run_hook(False, 1):
                pass
        for place, worker in enumerate(team):
            worker.step(gradients(2 * turn + place))
    return [worker.everything() for worker in team], state_bytes(center.state_dict())


def state_bytes(state):
    slots = [*state["optimizer"]["slots"].items(), ("variables", state["variables"])]
    return sorted((of, name, array.tobytes()) for of, each in slots for name, array in each.items())


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("gamma", [None, 0.5])
@pytest.mark.parametrize("kind", ["momentum", "lazy adam", "own"])
def test_training_over_a_center_elsewhere_has_the_same_bits(meshes, kind, gamma, scratch):
    here, there = meshes
    elsewhere = HostAGNCenter(here, gr.AGNCenter(there), scratch=scratch)
    wanted, found = (
        trained(here, center, kind, distance_scale=gamma, reset_momentum=True)
        for center in (gr.AGNCenter(here), elsewhere)
    )
    assert found == wanted


def test_ctrl_c_ends_a_push_that_waits_and_the_next_call_makes_it(meshes):
    here, there = meshes
    teams = []
    for center in (gr.AGNCenter(here), HostAGNCenter(here, gr.AGNCenter(there))):
        make = lambda: gr.MomentumOptimizer(0.5, 0.5)  # noqa: E731
        teams.append(Worker(here.devices[1], center, STARTS, make, period=2))
    calm, stopped = teams
    elsewhere = stopped.getter.center._shared
    grads = [gradients(seed) for seed in range(3)]
    assert [worker.step(grads[0]) for worker in teams] == [False, False]
    before = stopped.center
    elsewhere.is_stopped = True
    with pytest.raises(KeyboardInterrupt):
        stopped.step(grads[1])
    elsewhere.is_stopped = False
    assert stopped.optimizer.local_step.numpy() == 2
    assert all((value == before[name]).all() for name, value in stopped.center.items())
    assert calm.step(grads[1]) is True
    assert calm.step(grads[2]) is False
    assert stopped.step(grads[2]) is True  # makes the push first
    assert stopped.everything() == calm.everything()
