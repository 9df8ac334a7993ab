"""The real libnccl without a GPU: CuPy's signatures of its calls, and what our calls raise."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from fake_cupy.signatures import RECORD, described

from gradreduce.backends import CUDA
from gradreduce.comm.process_group import LocalGroup
from gradreduce.device import MeshState
from gradreduce.errors import CollectiveError

pytestmark = pytest.mark.libnccl
NAMES = [name for name in RECORD if name.startswith("cupy.cuda.nccl.") and RECORD[name] != ""]


@pytest.mark.parametrize("name", NAMES)
def test_the_fake_has_the_signatures_of_cupy(name):
    assert described(name) == RECORD[name]


@pytest.fixture
def collective(monkeypatch):
    """Our NCCL on a GPU that is not there, so that NCCL itself finds that out."""
    from gradreduce.backends.cuda import nccl

    monkeypatch.setattr(nccl, "CurrentGpu", lambda gpu: nullcontext())
    mesh_state = MeshState(CUDA, LocalGroup(), peer_access=False)
    made = nccl.NcclCollective(mesh_state).load()
    yield made
    made.close()
    assert made.wait_for_end(10)


def test_every_id_is_new_and_has_the_size_of_nccl(collective):
    one, other = collective.make_id(), collective.make_id()
    assert len(one) == len(other) == 128
    assert one != other


@pytest.mark.parametrize("num_gpus", [(1, 1), (2, 1)])
def test_processes_without_gpus_get_the_error_of_nccl(collective, num_gpus):
    """Also a process with two ranks, whose group is open while the first one fails."""
    devices = [SimpleNamespace(physical=gpu, name=f"cuda:{gpu}") for gpu in range(num_gpus[0])]
    with pytest.raises(CollectiveError, match=r"initialisation of GPUs 0.*: NCCL_ERROR_\w+: "):
        collective.join_processes(devices, collective.make_id(), 0, num_gpus, 10.0)
    assert collective.version > 21800
    assert collective.error() is None
