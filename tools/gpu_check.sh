#!/usr/bin/env bash
# Builds rlinf-comm with CUDA on a machine with a GPU and no network, runs the tests marked gpu (under compute-sanitizer
# too, where it exists) and the GPU benchmarks. Writes benchmarks/results/gpu-check.json. At most 8 minutes.
#   tools/gpu_check.sh
#   DRY_RUN=1 tools/gpu_check.sh    # without a device: builds, imports, collects the tests; writes no result
# Exit code: 0 all passed, 1 something failed (the JSON says what), 2 this machine cannot run it.
set -uo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
python="${PYTHON:-python3}"
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && python=.venv/bin/python
dry_run="${DRY_RUN:-}"
export PATH="$PATH:/usr/local/cuda/bin" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

fail() {
  echo "gpu_check: $1" >&2
  exit 2
}

"$python" -c 'import torch' 2>/dev/null || fail "$python has no torch; set PYTHON to one that has"
for module in numpy pytest scikit_build_core pybind11; do
  "$python" -c "import $module" 2>/dev/null || fail "$python has no $module, and nothing is downloaded here"
done
for tool in cmake nvcc; do
  command -v "$tool" >/dev/null || fail "$tool is missing; install it or put it on PATH"
done
if [ -z "$dry_run" ]; then
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
    fail "no CUDA device that torch can use; run this on a machine with a GPU"
fi

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
result=benchmarks/results/gpu-check.json
mkdir -p "$(dirname "$result")"
declare -A codes=()

# step NAME SECONDS COMMAND...: runs it with a limit, keeps its exit code.
step() {
  local name="$1" limit="$2"
  shift 2
  echo "== $name"
  timeout "$limit" "$@"
  codes[$name]=$?
}

write_result() {
  local name
  for name in "${!codes[@]}"; do echo "$name=${codes[$name]}"; done >"$work/codes"
  "$python" - "$work" "$result" <<'PY'
import json, pathlib, sys
work, result = map(pathlib.Path, sys.argv[1:])
steps = dict(line.split("=") for line in (work / "codes").read_text().split())

def read(name):
    path = work / name
    text = path.read_text() if path.exists() else ""
    return json.loads(text) if text.strip() else None

report = {
    "exit_codes": {name: int(code) for name, code in sorted(steps.items())},
    "benchmark": read("benchmark.json"),
    "sync": read("sync.json"),
}
result.write_text(json.dumps(report, indent=2) + "\n")
print(json.dumps(report))
PY
}

if [ -n "$dry_run" ]; then
  architecture=90-real
  result="$work/gpu-check.json"
else
  architecture="$("$python" -c 'import torch; print("%d%d-real" % torch.cuda.get_device_capability())')"
fi
RLINF_CUDA=ON RLINF_CUDA_ARCHS="$architecture" step build 100 "$python" -m pip install --quiet --no-build-isolation \
  --no-deps --no-index --target "$work/site" packages/rlinf-comm
if [ "${codes[build]}" -ne 0 ]; then
  write_result
  exit 1
fi
export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
# The GPU tests are files of their own, so that the others' needs (hypothesis) are none here.
tests=("$python" -m pytest -q -p no:cacheprovider -o addopts=--import-mode=importlib -m gpu packages/rlinf-comm/tests/*_gpu.py)
step import 30 "$python" -c 'import rlinf_comm.weights.device, rlinf_comm.cuda as c, sys
assert rlinf_comm.has_cuda_kernels(), "built without kernels"; print(rlinf_comm.__file__)'
if [ -n "$dry_run" ]; then
  step collect 60 "${tests[@]}" --collect-only
  step benchmark 30 "$python" -m py_compile benchmarks/comm/gpu_copy.py
  step sync 120 "$python" benchmarks/comm/gpu_sync.py --fake --rounds 1
else
  step tests 120 "${tests[@]}"
  if command -v compute-sanitizer >/dev/null; then
    step sanitizer 80 compute-sanitizer --tool memcheck --error-exitcode 9 "${tests[@]}" -k "layouts or 0- or nan or digests"
  fi
  step benchmark 60 "$python" benchmarks/comm/gpu_copy.py >"$work/benchmark.out"
  grep '^{' "$work/benchmark.out" >"$work/benchmark.json"
  step sync 90 "$python" benchmarks/comm/gpu_sync.py >"$work/sync.out"
  grep '^{' "$work/sync.out" >"$work/sync.json"
fi
write_result
for code in "${codes[@]}"; do [ "$code" -eq 0 ] || exit 1; done
