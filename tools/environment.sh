# Sourced by the scripts of this folder: makes the virtual environment .venv in the checkout and installs everything into it.
# After the first time it takes a second: a stamp remembers what was installed.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

fail() {
  echo "$1" >&2
  exit 2
}

# The first Python from 3.10 to 3.13 that can make a virtual environment; PYTHON overrides the choice. 3.13 comes last,
# because ManiSkill does not install there.
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.10 python3.13 python3; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
    "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || continue
    "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
      fail "$candidate cannot make virtual environments; install them: apt-get install python3-venv"
    echo "$candidate"
    return
  done
  fail "needs Python 3.10 to 3.13 (found: $(python3 --version 2>&1)); for example: apt-get install python3 python3-venv"
}

check_compiler() {
  command -v c++ >/dev/null || command -v g++ >/dev/null ||
    fail "needs a C++ compiler for the native code; for example: apt-get install g++"
}

# Whether ManiSkill installs under the environment's Python: the motion planner that it requires (mplib 0.1.1) has no
# build for 3.13. rlinf[all] has the same condition.
can_have_maniskill() {
  .venv/bin/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))'
}

# Everything that decides what is installed: the packages' metadata, the native sources and this file.
fingerprint() {
  cat tools/constraints.txt tools/environment.sh CMakeLists.txt packages/*/pyproject.toml \
    $(find csrc -type f \( -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name 'CMakeLists.txt' \) | sort) | sha256sum
}

# make_venv FOLDER: a venv with the Python of find_python, unless the folder has one.
make_venv() {
  local python
  [ ! -x "$1/bin/python" ] || return 0
  python="$(find_python)" || exit 2
  echo "making $1 with $("$python" --version)"
  "$python" -m venv "$1"
}

# pip_of FOLDER ARGUMENTS: pip of a venv, with the versions that are known to work together.
pip_of() {
  "$1/bin/python" -m pip --quiet --disable-pip-version-check install -c tools/constraints.txt "${@:2}"
}

# Before everything else, so that pip keeps the build that its index gives for this machine.
install_torch() {
  echo "installing torch"
  pip_of "$1" torch numpy
}

install_everything() {
  local envs="metaworld,video"
  check_compiler
  make_venv .venv
  if can_have_maniskill; then
    envs="maniskill,$envs"
  else
    echo "without ManiSkill: it does not install under $(.venv/bin/python --version)"
  fi
  install_torch .venv
  echo "building the native code and installing the packages"
  pip_of .venv hatchling editables "scikit-build-core>=1.1" "pybind11>=3.0" ninja cmake
  pip_of .venv --no-build-isolation \
    -e packages/rlinf-comm -e packages/rlinf-sched -e "packages/rlinf-algos[math]" -e "packages/rlinf-envs[$envs]" \
    -e "packages/rlinf-workers[lora,agents]" -e packages/rlinf
  # megatron-core's own requirements are installed by now, and pip must not touch torch for it.
  pip_of .venv --no-deps megatron-core packaging
}

# The environment of engine_tests/: SGLang, or the engine that is named, for CPU slots, made by `rlinf venv create` into the
# checkout's own folder, and what tests need. After the first time it takes a second or two.
ensure_engine_environment() {
  export RLINF_VENVS="$root/.venv/venvs" SGLANG_USE_CPU_ENGINE=1 RLINF_TEST_DRIVER="$root/.venv/bin/python"
  local engine="${1:-sglang}" status=0
  local list=".venv/$engine-versions.txt"
  engine_python="$RLINF_VENVS/$engine/bin/python"
  .venv/bin/rlinf venv create "$engine" --cpu || status=$?
  if [ "$status" = 2 ] && [ -x "$engine_python" ]; then # its list has changed
    .venv/bin/rlinf venv remove "$engine"
    .venv/bin/rlinf venv create "$engine" --cpu
  elif [ "$status" != 0 ]; then
    return "$status"
  fi
  sed 's/ --hash.*//' "packages/rlinf-workers/src/rlinf_workers/engines/$engine/requirements-cpu.txt" >"$list" # the tests' packages have no digests
  "$engine_python" -m pip --quiet --disable-pip-version-check install -c "$list" pytest pytest-timeout hypothesis
}

ensure_environment() {
  local stamp=.venv/installed
  if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$(fingerprint)" ]; then
    install_everything
    fingerprint >"$stamp"
  fi
  # Several processes with as many threads as there are cores slow each other down many times.
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
}
