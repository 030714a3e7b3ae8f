#!/usr/bin/env bash
# Builds rlinf-comm's sdist, then its wheel from that sdist alone in an empty folder, and imports it. Catches a source that the sdist forgot.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
.venv/bin/python -m build --no-isolation --sdist --outdir "$scratch" packages/rlinf-comm >"$scratch/sdist.log" 2>&1 || { cat "$scratch/sdist.log"; exit 1; }
mkdir "$scratch/empty"
(cd "$scratch/empty" && "$root/.venv/bin/python" -m pip --quiet wheel --no-build-isolation --no-deps -w "$scratch/wheel" "$scratch"/rlinf_comm-*.tar.gz)
"$root/.venv/bin/python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip --quiet --disable-pip-version-check install numpy # torch is needed only for tensors
"$scratch/venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps "$scratch"/wheel/*.whl
cd "$scratch/empty"
"$scratch/venv/bin/python" -c "
import rlinf_comm
from rlinf_comm.channel import Channel
channel = Channel.create('check')
channel.put({'number': 7})
assert channel.take()[0].value == {'number': 7}
print('the wheel from the sdist imports and works; CUDA kernels compiled in:', rlinf_comm.has_cuda_kernels())"
