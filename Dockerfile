# The tests of gradreduce on a machine with an NVIDIA GPU:
#
#     docker build -t gradreduce . && docker run --rm --gpus all gradreduce
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

# What the package is built from and what its tests read; the rest of the checkout stays outside.
WORKDIR /gradreduce
COPY pyproject.toml README.md LICENSE CHANGELOG.md CONTRIBUTING.md Dockerfile .dockerignore ./
COPY src src
COPY kernels kernels
COPY tests tests
COPY examples examples
COPY bench bench

RUN pip install ".[cuda12,test]"

# Without the flag a container started without `--gpus all` would skip every GPU test and pass.
CMD ["pytest", "--require-gpu"]
