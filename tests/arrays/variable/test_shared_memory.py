"""Variables on memory that others own too: every call that writes checks the memory first."""

import numpy as np
import pytest

import gradreduce as gr


class Shared(gr.Variable):
    """Makes Variables like those of ``gr.torch.variables``, without PyTorch."""

    is_stale = False

    @property
    def buffers(self):
        self._check_memory()
        return super().buffers

    def _check_memory(self):
        if self.is_stale:
            raise RuntimeError("stale")


ONES = np.ones(4, "f4")
WRITES = {
    "assign": lambda variable, step: variable.assign(ONES),
    "assign_add": lambda variable, step: variable.assign_add(ONES),
    "a step": lambda variable, step: step([[[ONES]], [[ONES]]]),
}


@pytest.mark.whole_product
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_a_call_that_would_write_stale_memory_changes_nothing(name, shard_optimizer):
    with gr.open_mesh(2, backend="sim") as mesh:
        variable = Shared(ONES, device=mesh)
        step = gr.SyncStep(
            [variable],
            gr.MomentumOptimizer(0.5, 0.5),
            gr.AllReduceCrossDeviceOps(),
            shard_optimizer=shard_optimizer,
        )
        WRITES[name](variable, step)
        before, (moment,) = variable.numpy(), step.optimizer.variables()[:1]
        moments, steps = moment.numpy(), step.global_step
        variable.is_stale = True
        with pytest.raises(RuntimeError, match="stale"):
            WRITES[name](variable, step)
        variable.is_stale = False
        assert (variable.numpy() == before).all()
        assert (moment.numpy() == moments).all()
        assert (step.global_step, step.accumulators[0].num_accumulated()) == (steps, 0)
        WRITES[name](variable, step)
