#!/usr/bin/env bash
# Every test, in the environment that tools/quickstart.sh uses.
#   tools/test.sh [--all] [pytest arguments]       --all: also those marked slow
#   tools/test.sh --engines [pytest arguments]     engine_tests/, in an environment with SGLang that is made for them
#   tools/test.sh --engines=vllm [arguments]       those of vLLM, in one with vLLM
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if [[ "${1:-}" == --engines* ]]; then
  engine="${1#--engines}" engine="${engine#=}"
  shift
  ensure_environment
  ensure_engine_environment "${engine:-sglang}"
  [ $# -gt 0 ] || set -- engine_tests
  "$engine_python" -m pytest "$@"
  exit
fi

unset PYTHONDONTWRITEBYTECODE # with it, each process that a test starts compiles our packages again
selection=(-m "not slow and not gpu")
clients=()
if [ "${1:-}" = "--all" ]; then
  shift
  selection=(-m "not gpu")
  clients=(openpi-client==0.1.2 vla-eval==0.8.0) # of rlinf serve; the first one's requirements exclude NumPy 2
fi

ensure_environment
.venv/bin/python -m pip --quiet --disable-pip-version-check install -c tools/constraints.txt -r tools/test-requirements.txt
[ ${#clients[@]} -eq 0 ] || .venv/bin/python -m pip --quiet --disable-pip-version-check install --no-deps "${clients[@]}"
if [ $# -gt 0 ]; then
  .venv/bin/python -m pytest "${selection[@]}" "$@"
  exit
fi
# Three tests at a time on the two cores of a small machine: a third of a test's time is waiting.
.venv/bin/python -m pytest "${selection[@]}" -n 3 --dist worksteal --durations=20
