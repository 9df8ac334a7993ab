"""The CUDA backend: GPUs through CuPy, collectives through NCCL."""
