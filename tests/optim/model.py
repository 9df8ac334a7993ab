"""Variables that an optimizer trains, and their complete state."""

import numpy as np

import gradreduce as gr


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


class Model:
    """Two mirrored variables, one on one device, their slots, and all their values."""

    def __init__(self, mesh):
        self.variables = [
            gr.Variable(np.full((2, 3), 1.0), "w", dtype="float32", device=mesh),
            gr.Variable(np.full(3, 2.0), "b", dtype="float16", device=mesh),
            gr.Variable(3.0, "s", device=mesh.devices[1]),
        ]
        self.step = gr.Variable(0, "global_step", trainable=False, device=mesh)
        self.optimizer = gr.MomentumOptimizer(1.0, 0.5)
        self.grads = [np.ones(v.shape, v.dtype) for v in self.variables]
        self.optimizer.apply_gradients(self.pairs(), self.step)

    def pairs(self, *grads):
        return list(zip(grads or self.grads, self.variables, strict=False))

    def state(self):
        return [
            [buffer.numpy().tolist() for buffer in variable.buffers]
            for variable in (*self.variables, *self.optimizer.variables(), self.step)
        ]
