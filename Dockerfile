# The tests of gradreduce on a machine with an NVIDIA GPU:
#
#     docker build -t gradreduce .
#     docker run --rm --gpus all --shm-size=1g --ulimit memlock=-1 gradreduce
#
# GPUs without peer access talk through shared memory and pinned memory: NCCL needs more than the
# 64 MB of /dev/shm and the locked memory that Docker gives by default.
#
# With PyTorch and JAX, and only the tests of their arrays on GPUs; where one of the two is missing
# they fail, and do not skip:
#
#     docker build -t gradreduce --build-arg CUDA=13 --build-arg LIBRARIES="torch jax[cuda13]" .
#     docker run --rm --gpus all --shm-size=1g --ulimit memlock=-1 gradreduce \
#         pytest -m "(gpu or multi_gpu) and (torch or jax)" --require-gpu --require torch --require jax
#
# The base image without CUDA's libraries, because the Python wheels below bring NVRTC, cuBLAS and
# NCCL themselves: a runtime or devel image would carry several gigabytes of them twice.
FROM nvidia/cuda:12.9.1-base-ubuntu24.04

# g++ builds the shipped CUDA text for the CPU, so that the tests marked `host` run here too.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Ubuntu refuses pip into its own Python (PEP 668), so a virtual environment comes first on PATH:
# from here on `python`, `pip` and `pytest` are the environment's, in RUN, CMD and `docker exec`.
RUN python3 -m venv /opt/venv
ENV PATH="/opt/venv/bin:$PATH"

# Wheels of this size are not worth keeping a second time in pip's cache.
ENV PIP_NO_CACHE_DIR=1

# JAX would take three quarters of the GPU's memory when it starts, and leave too little for others.
ENV XLA_PYTHON_CLIENT_PREALLOCATE=false

# What the package is built from and what its tests read; the rest of the checkout stays outside.
WORKDIR /gradreduce
COPY pyproject.toml README.md LICENSE CHANGELOG.md CONTRIBUTING.md SECURITY.md CITATION.cff ./
COPY Dockerfile .dockerignore .pre-commit-config.yaml ./
COPY .ci .ci
COPY .github .github
COPY src src
COPY kernels kernels
COPY tests tests
COPY examples examples
COPY docs docs
COPY bench bench
COPY tools tools

# The CUDA of the wheels, 12 or 13, and other libraries beside them. All of them must be of one CUDA:
# the NCCL wheels of both put their library in the same place. PyTorch's wheels are of CUDA 13 from
# 2.11 on, and older ones want an older NVRTC than the tests do; JAX has `jax[cuda12]` and
# `jax[cuda13]`. CUDA 13 needs a driver of the 580 series or newer.
ARG CUDA=12
ARG LIBRARIES=""

# One command for all of them, so that pip chooses versions that go together; Ubuntu's pip 24 does not
# find those of PyTorch, JAX and CuPy in minutes. Unquoted, because they are words.
# hadolint ignore=DL3013,SC2086
RUN pip install --upgrade pip \
    && set -f \
    && pip install ".[cuda${CUDA},test]" $LIBRARIES

# Without the flag a container started without `--gpus all` would skip every GPU test and pass.
CMD ["pytest", "--require-gpu"]
