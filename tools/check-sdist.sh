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
"$root/.venv/bin/python" -m pip --quiet install --no-deps --target "$scratch/installed" "$scratch"/wheel/*.whl
cd "$scratch/empty"
PYTHONPATH="$scratch/installed" "$root/.venv/bin/python" -c "
import rlinf_comm
assert rlinf_comm.__file__.startswith('$scratch'), rlinf_comm.__file__
print('wheel from sdist imports; CUDA kernels compiled in:', rlinf_comm.has_cuda_kernels())"
