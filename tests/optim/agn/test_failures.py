"""A push that fails has changed nothing; if it fails part-way, all workers get errors."""

import copy

import numpy as np
import pytest
from optim.agn.team import KINDS, Own, pair, whole
from support.failing_operations import InjectedError, failing_at

import gradreduce as gr
from gradreduce.errors import CollectiveError

STARTS = {"a": np.zeros((6, 2), "float32"), "b": np.zeros((6, 2), "float32"),
          "c": np.zeros((6, 2), "float32")}  # fmt: skip
WAYS = {
    "momentum": (KINDS["momentum"][1], {}),
    "adam": (KINDS["adam"][1], {"reset_momentum": True}),
    "distance": (KINDS["sgd"][1], {"distance_scale": 0.5}),
    "rows": (KINDS["momentum"][1], {"distance_scale": 0.5}),
    "own": (Own, {}),
}


def gradients(way, seed):
    values = {name: whole(value.shape, seed=seed + at) for at, (name, value) in
              enumerate(STARTS.items())}  # fmt: skip
    if "rows" not in way:
        return values
    return {name: gr.IndexedSlices(grad[:3], [4, seed % 6, 4]) for name, grad in values.items()}


def of_center(center):
    found = [*center.variables(), *center._shared.slot_variables()]
    return [(var.name, var.numpy().tobytes()) for var in found]


class Case:
    """Two workers, and a center on other logical devices, before a push.

    So an operation that fails on the center's devices belongs to the push.
    """

    def __init__(self, mesh, way):
        make, options = WAYS[way]
        self.way, self.center = way, gr.AGNCenter(mesh[1:])
        self.worker, self.other = pair(mesh, 2, make, STARTS, 2, center=self.center, **options)
        for seed in range(3):
            self.step(seed)
        self.before = self.worker.everything(), of_center(self.center)
        self.states = copy.deepcopy((self.center.state_dict(), self.worker.optimizer.state_dict()))

    def step(self, seed):
        return self.worker.step(gradients(self.way, seed))

    def continued(self):
        """The state two steps later."""
        self.step(4)
        return self.worker.everything(), of_center(self.center)

    def after_a_failure(self, wanted) -> str:
        """Returns the state; checks that training continues as without the failure."""
        if self.center._shared.fault is not None:
            self.check_refused()
            self.center.load_state_dict(self.states[0])
            self.worker.optimizer.load_state_dict(self.states[1])
            assert self.step(3) is True
            assert self.continued() == wanted
            return "half"
        assert of_center(self.center) == self.before[1]
        if self.worker.optimizer.local_step.numpy() == 3:
            assert self.worker.everything() == self.before[0]
            assert self.step(3) is True
            assert self.continued() == wanted
            return "nothing"
        assert self.worker.step(gradients(self.way, 4)) is True  # makes up
        assert (self.worker.everything(), of_center(self.center)) == wanted
        return "due"

    def check_refused(self):
        text = r"the center is only partly updated.*AGNOptimizer: InjectedError\(.*load_state_dict"
        with pytest.raises(CollectiveError, match=text):
            self.step(5)
        with pytest.raises(CollectiveError, match=text):
            self.other.step(gradients(self.way, 0)), self.other.step(gradients(self.way, 0))
        with pytest.raises(CollectiveError, match=text):
            self.other.optimizer.get_init_op(1)()
        with pytest.raises(CollectiveError, match=text):
            self.center.state_dict()


@pytest.mark.parametrize("method", ["_allocate", "_compile_kernel", "_launch", "_copy"])
@pytest.mark.parametrize("way", WAYS)
def test_whatever_fails(mesh, way, method):
    """The first call fails, then the second, until all have failed once; every third allocation."""
    calm, step = Case(mesh, way), 3 if method in ("_allocate", "_compile_kernel") else 1
    assert calm.step(3) is True
    wanted, outcomes = calm.continued(), []
    for first in range(1, 60, step):
        case = Case(mesh, way)
        devices = mesh.devices if method == "_copy" else mesh.devices[1:]
        try:
            with failing_at(devices, first, [method]):
                case.step(3)
        except InjectedError as error:
            told = any("push failed part-way" in note for note in getattr(error, "__notes__", ()))
            assert told is (case.center._shared.fault is not None)
            outcomes.append(case.after_a_failure(wanted))
            continue
        assert case.continued() == wanted
        break
    if method in ("_allocate", "_compile_kernel"):
        assert set(outcomes) <= {"nothing", "due"}
    elif method == "_launch":
        num_gpus = len({device.physical for device in mesh.devices[1:]})
        assert outcomes[0] == "due"
        assert ("half" in outcomes) is (num_gpus > 1 or "rows" in way)
        assert outcomes == sorted(outcomes), "due until the center changes"
        # Rows for the distance, that, the mean, rows merged, rows taken out, the rule: the first
        # launch that writes there is behind them.
        assert outcomes.count("due") >= (6 if "rows" in way else 1)


def test_a_launch_of_the_local_step_that_fails_leaves_all_as_before(mesh):
    case = Case(mesh, "momentum")
    with failing_at(mesh.devices[:1], 1, ["_launch"]), pytest.raises(InjectedError):
        case.step(3)
    assert (case.worker.everything(), of_center(case.center)) == case.before
    assert case.center._shared.fault is None


@pytest.mark.parametrize("what", ["rate", "rule", "plan"])
def test_a_first_step_that_fails_leaves_no_slots_and_no_pending_push(mesh, monkeypatch, what):
    """Also if it fails while later steps are planned."""

    def fail(*args):
        raise InjectedError

    make = Own if what == "rule" else KINDS["adam"][1]
    starts, grads = {"v": np.ones(1, "float32")}, {"v": np.ones(1, "float32")}
    (calm,), (worker,) = (pair(mesh, 1, make, starts, 1) for _ in range(2))
    with monkeypatch.context() as patch:
        if what == "plan":
            patch.setattr("gradreduce.optim.agn.local_step.Plan", fail)
        else:
            patch.setattr(worker.inner, "_apply" if what == "rule" else "learning_rate", fail)
        before = worker.optimizer.state_dict()
        for _ in range(2):
            with pytest.raises(InjectedError):
                worker.step(grads)
            assert worker.optimizer.state_dict() == before
            assert worker.optimizer.get_slot_names() == []
        if what == "rate":
            assert worker.optimizer.variables() == []  # nor at the center
    for _ in range(2):
        assert calm.step(grads) is worker.step(grads) is True
    assert worker.everything() == calm.everything()


def test_a_pending_push_is_saved_by_a_checkpoint(mesh):
    calm, case = Case(mesh, "momentum"), Case(mesh, "momentum")
    calm.step(3)
    with failing_at(mesh.devices[1:], 1, ["_launch"]), pytest.raises(InjectedError):
        case.step(3)
    state = case.worker.optimizer.state_dict()
    assert state["is_due"] is True
    case.worker.optimizer.get_init_op(0)()  # and is given up at a start
    assert case.worker.optimizer.state_dict()["is_due"] is False
    case.worker.optimizer.load_state_dict(state)
    assert case.continued() == calm.continued()
