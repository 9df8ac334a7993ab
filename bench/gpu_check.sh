#!/usr/bin/env bash
# The one command that runs everything that needs a GPU; bench/README.md says what it shows.
#
#     bench/gpu_check.sh [--fake] [--limit SECONDS] [SECTION[:PART]...]
#
# Sections: first, tests, nccl, example, bench, sanitize; all of them by default. first has nine
# steps, each of less than ten minutes: first:1 to first:9. Each section, and each step, leaves one
# JSON file in $OUT, or in bench/results. Nothing needs to be installed but what a GPU machine has:
# CuPy, NumPy, ml_dtypes, pytest, hypothesis, click and rich. PYTHON names the interpreter (python3).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root/src:$root/bench:$root/examples${PYTHONPATH:+:$PYTHONPATH}"
# exec, so that a signal to this script reaches the program that ends its children. -P keeps the
# caller's folder off the path of imports.
exec "${PYTHON:-python3}" -P -m gpu_check "$@"
