"""Programs under random schedules have the values of their order of submission."""

from threading import Thread

import numpy as np
import pytest
from support.order_programs import DTYPE, MIX, SIZE, Program, check, random_program

import gradreduce as gr
from gradreduce.device import CommandList, RepeatedWork

SHARES = 20  # of the programs of the tier exhaustive, each a test of some seconds
WHOLE = (0, SIZE)


def launched(device, queue, target, *sources):
    """Writes a part of a slot: (slot, first element, size)."""
    return ("launch", device, queue, 1, ((target, *sources),))


# Slots 0 to 2 are on device 0, slot 3 is on device 1 of another GPU. In each program one wait is
# needed that no other one replaces.
SMALL = {
    "each part of a block has its own writer": [
        launched(1, "compute", (0, *WHOLE)),
        launched(0, "transfer", (0, 0, 8)),
        launched(0, "compute", (1, 0, 8), (0, 16, 8)),
    ],
    "a reader of one part waits for no other": [
        launched(1, "compute", (0, 0, 8)),
        launched(0, "compute", (1, 0, 8), (0, 16, 8)),
        launched(0, "compute", (0, 0, 8)),
    ],
    "bytes before a part keep their writer": [
        launched(1, "compute", (0, *WHOLE)),
        launched(0, "transfer", (0, 16, 8)),
        launched(0, "compute", (1, 0, 8), (0, 0, 8)),
    ],
    "each part of a block has its own readers": [
        launched(0, "transfer", (1, 0, 8), (0, 16, 8)),
        launched(0, "compute", (0, 16, 8)),
    ],
    "a reader of several parts waits for each writer": [
        launched(1, "compute", (0, 8, 8)),
        launched(0, "compute", (1, *WHOLE), (0, *WHOLE)),
    ],
    "an operation uses each of its operands": [
        ("launch", 1, "compute", 1, (((3, 0, 8), (0, 0, 8)), ((3, 8, 8), (0, 16, 8)))),
        launched(0, "compute", (0, 16, 8)),
    ],
    "an operation reads and writes the same part": [
        launched(1, "compute", (0, 0, 8), (0, 0, 8)),
        launched(0, "compute", (1, 0, 8), (0, 0, 8)),
    ],
    "a second reader waits for the writer too": [
        launched(1, "compute", (3, *WHOLE), (1, *WHOLE)),
        launched(0, "compute", (0, *WHOLE)),
        launched(0, "transfer", (2, *WHOLE), (0, *WHOLE)),
        launched(1, "compute", (3, *WHOLE), (0, *WHOLE)),
    ],
    "a later operation of the same queue is waited for": [
        launched(1, "compute", (0, 0, 8)),
        launched(0, "compute", (1, 0, 8), (0, 0, 8)),
        launched(1, "compute", (0, 8, 8)),
        launched(0, "compute", (1, 0, 8), (0, 8, 8)),
    ],
    "two queues read and one of them writes": [
        ("copy", "target", "transfer", (1, *WHOLE), (0, *WHOLE)),
        launched(0, "compute", (2, *WHOLE), (0, *WHOLE)),
        launched(0, "compute", (0, *WHOLE)),
    ],
    "each rank of a collective waits": [
        launched(1, "compute", (0, *WHOLE), (3, *WHOLE)),
        ("copy", "target", "transfer", (1, *WHOLE), (3, *WHOLE)),
        ("collective", "broadcast", "compute", *[((0, *WHOLE), (3, *WHOLE))] * 2, 0),
    ],
    "a freed block is used again": [
        ("copy", "target", "transfer", (1, *WHOLE), (0, *WHOLE)),
        ("renew", 0, "zeros", "compute", 0),
    ],
    "a step is replayed after a wait": [
        ("record", 0, "prepare", (launched(0, "compute", (0, *WHOLE)),)),
        launched(1, "compute", (3, *WHOLE), (1, *WHOLE)),
        ("replay", 0),
        launched(1, "compute", (3, *WHOLE), (0, *WHOLE)),
    ],
    "a step writes what another queue reads": [
        ("record", 0, "prepare", (launched(0, "compute", (0, *WHOLE)),)),
        ("copy", "target", "transfer", (1, *WHOLE), (0, *WHOLE)),
        ("replay", 0),
    ],
    "a wait before the list is not in it": [
        launched(1, "compute", (3, *WHOLE), (1, *WHOLE)),
        ("record", 0, "prepare", (launched(1, "compute", (3, *WHOLE), (0, *WHOLE)),)),
        launched(0, "compute", (0, *WHOLE)),
        ("replay", 0),
    ],
    "a block was used before the list": [
        launched(1, "compute", (0, *WHOLE)),
        (
            "record", 0, "prepare",
            (launched(1, "compute", (0, *WHOLE)), launched(0, "compute", (1, *WHOLE), (0, *WHOLE))),
        ),
        ("replay", 0),
        ("replay", 0),
    ],
    "a list ends on another queue": [
        ("record", 0, "prepare", (launched(1, "compute", (0, *WHOLE)),)),
        ("replay", 0),
        launched(0, "compute", (0, *WHOLE)),
    ],
    "a captured step runs on another queue": [
        ("record", 0, "capture", (launched(1, "compute", (3, *WHOLE), (0, *WHOLE)),)),
        ("replay", 0),
        launched(0, "compute", (0, *WHOLE)),
        ("replay", 0),
    ],
    "a step exchanges and then works": [
        (
            "record", 0, "prepare",
            (("exchange", 0, "transfer", ((2, 0, 8),), ((0, 0, 8),)), ("fill", (0, 0, 8))),
        ),
        ("replay", 0),
        launched(1, "compute", (3, 0, 8), (0, 0, 8)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.whole_product
def test_a_small_program_has_the_values_of_its_order(name):
    check(Program(0, (0, 1), (0, 0, 0, 1), 16, ((tuple(SMALL[name]),),)), range(20))


@pytest.mark.parametrize(
    "seed", [*range(10), 22]
)  # the last one needs the readers of joined ranges
@pytest.mark.whole_product
def test_a_program_has_the_values_of_its_order(seed):
    check(random_program(seed), range(10))


@pytest.mark.parametrize("seed", range(10))
def test_a_step_is_one_operation_for_other_threads(seed):
    """A copy of another thread has the values from before all of its launches, or after them."""
    with gr.open_mesh([0, 1], backend="sim", schedule_seed=seed) as mesh:
        device, away = mesh.devices
        near, copied = device.upload(np.ones(SIZE, DTYPE)), away.zeros((SIZE,), DTYPE)
        commands = CommandList()
        with mesh.mesh_state.recording_commands(commands):
            for _ in range(2):
                device.launch(MIX, (), [(near, near)], (1,))
            work = RepeatedWork(mesh.devices, commands)
        thread = Thread(target=away.copy, args=(copied, near))

        def replay():
            thread.start()
            thread.join(0.1)
            commands.run()

        work.run(replay)
        thread.join()
        assert copied.numpy()[0] in (6**2, 6**4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", range(SHARES))
def test_many_programs_have_the_values_of_their_order(share):
    for seed in range(10 + share, 210, SHARES):
        check(random_program(seed), range(50))
