#!/usr/bin/env bash
# Runs the instructions of the Dockerfile in a fresh Debian root, without Docker and without a GPU:
#
#     tools/try_dockerfile.sh [ROOT [ARGUMENT OF PYTEST...]]
#
# by hand, as root, with debootstrap installed. ROOT is an empty or missing folder (default: a
# temporary one, removed at the end). RUN lines run by chroot; ENV, ARG, WORKDIR and COPY mean what
# they mean to Docker. The extra of CUDA is left out of `pip install`, so that CuPy and NCCL are
# not installed, and instead of CMD the tests named are run (default: those of add_n).
# Variables:
#     SUITE, MIRROR   of debootstrap; default bookworm, whose Python is 3.11, and its own mirror
#     BIND            folders that the root shares with this machine, such as a local package index
# The variables PIP_* and the configuration of pip of this machine are those of the root.
set -euo pipefail

checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[[ $(id -u) == 0 ]] || { echo "run it as root: it calls debootstrap and chroot" >&2; exit 2; }
command -v debootstrap >/dev/null || { echo "install debootstrap" >&2; exit 2; }

root="${1-}"
shift || true
if [[ -n $root && -d $root && -n $(ls -A "$root") ]]; then echo "$root is not empty" >&2; exit 2; fi
made=""
if [[ -z $root ]]; then made="$(mktemp -d)" && root="$made"; fi
mkdir -p "$root"
root="$(cd "$root" && pwd)"

mounted=()
clean_up() {
  local each
  for each in "${mounted[@]}"; do umount "$each" || made=""; done
  if [[ -n $made ]]; then rm -rf --one-file-system "$made"; fi
}
trap clean_up EXIT

# share FOLDER [OPTION...]: the same folder inside the root.
share() {
  mkdir -p "$root$1"
  mount --bind "${@:2}" "$1" "$root$1"
  mounted=("$root$1" "${mounted[@]}")
}

debootstrap --variant=minbase "${SUITE-bookworm}" "$root" ${MIRROR-}
share /proc
share /dev
for folder in ${BIND-}; do share "$folder" -o ro; done
# Names, pip's configuration and certificates, as this machine has them; these under another name,
# because apt writes its own over the usual one.
for file in /etc/resolv.conf /etc/hosts /etc/pip.conf; do
  if [[ -e $file ]]; then cp "$file" "$root$file"; fi
done
certificates="${PIP_CERT-/etc/ssl/certs/ca-certificates.crt}"
if [[ -e $certificates ]]; then
  cp "$certificates" "$root/certificates.crt"
  export PIP_CERT=/certificates.crt SSL_CERT_FILE=/certificates.crt
  export REQUESTS_CA_BUNDLE=/certificates.crt
fi

# The instructions as a program for the shell in the root; what COPY takes is put into its place.
python3 - "$checkout" "$root" >"$root/try.sh" <<'PYTHON'
import re
import shlex
import shutil
import sys
from pathlib import Path

checkout, root = map(Path, sys.argv[1:])
text = (checkout / "Dockerfile").read_text(encoding="utf-8")
lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
text = re.sub(r"\\\s*\n", " ", "\n".join(lines))
workdir = Path("/")
print("set -eux")
for line in filter(None, map(str.strip, text.splitlines())):
    name, _, rest = line.partition(" ")
    if name == "RUN":
        changed = re.sub(r"cuda\$\{CUDA\},", "", rest)
        print(f"( {changed} )")
    elif name in ("ENV", "ARG"):
        print(f"export {rest}")
    elif name == "WORKDIR":
        workdir = Path(rest)
        (root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        print(f"cd {shlex.quote(rest)}")
    elif name == "COPY":
        *sources, target = shlex.split(rest)
        for source in sources:
            place = root / str(workdir / target).lstrip("/")
            if (checkout / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", ".git")
                shutil.copytree(checkout / source, place, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy(checkout / source, place)
    elif name not in ("FROM", "CMD"):
        sys.exit(f"unknown instruction: {line}")
print('pytest "$@"')
PYTHON

if (($# == 0)); then set -- -q tests/ops/test_add_n.py; fi
chroot "$root" /bin/sh /try.sh "$@"
echo "All instructions of the Dockerfile but FROM and CMD have run."
