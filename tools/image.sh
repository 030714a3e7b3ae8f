#!/usr/bin/env bash
# The steps of docker/Dockerfile and docker/Dockerfile.cuda. All of them also run without a container runtime.
#   tools/image.sh system run|build|dev   Debian or Ubuntu packages to run, to build, to work in a checkout; as root
#   tools/image.sh requirements VENV      a venv with what rlinf[all] requires of others; reads only pyproject.toml files
#   tools/image.sh packages VENV          builds RLinf's packages from the checkout and installs them
#   tools/image.sh venvs VENV NAME...     `rlinf venv create` for each name, in RLINF_VENVS
#   tools/image.sh check VENV             pip check, rlinf doctor, two steps of sort-grpo, and pushcube-ppo where it installs
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  fail "usage: tools/image.sh system run|build|dev | requirements VENV | packages VENV | venvs VENV NAME... | check VENV"
}

# Whether python3 has its headers and can make venvs, as in the images of Python.
can_build_for_python() {
  python3 -c 'import ensurepip, sysconfig; open(sysconfig.get_path("include") + "/Python.h").close()' 2>/dev/null
}

install_system_packages() {
  local packages
  case "$1" in
    # OpenCV loads libgl1 and libglib2.0-0; MuJoCo renders through libegl1 with Mesa's software driver.
    run) packages=(ca-certificates libegl1 libgl1 libgl1-mesa-dri libglib2.0-0) ;;
    build) packages=(g++) ;;
    dev) packages=(g++ git openssh-client) ;;
    *) usage ;;
  esac
  [ "$1" = run ] || can_build_for_python || packages+=(python3-dev python3-venv)
  apt-get update
  DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${packages[@]}"
  rm -rf /var/lib/apt/lists/*
}

install_requirements() {
  make_venv "$1"
  install_torch "$1"
  pip_of "$1" packaging
  echo "installing what rlinf[all] requires"
  local requirements
  mapfile -t requirements < <("$1/bin/python" tools/third_party.py)
  [ ${#requirements[@]} -gt 0 ] || fail "tools/third_party.py printed no requirements"
  pip_of "$1" "${requirements[@]}"
}

install_packages() {
  check_compiler
  echo "building RLinf's packages"
  # pip builds each in an isolated venv, so the image does not get the build tools.
  pip_of "$1" --no-deps packages/rlinf-comm packages/rlinf-sched packages/rlinf-algos packages/rlinf-envs \
    packages/rlinf-workers packages/rlinf
}

create_venvs() {
  local name
  for name in "${@:2}"; do
    "$1/bin/rlinf" venv create "$name"
  done
}

check() {
  local venv recipe recipes=(sort-grpo)
  venv="$(cd "$1" && pwd)"
  scratch="$(mktemp -d)" # not local: the trap runs after the function
  trap 'rm -rf "$scratch"' EXIT
  cd "$scratch"
  "$venv/bin/python" -m pip check
  "$venv/bin/rlinf" doctor || [ $? -eq 1 ]
  "$venv/bin/python" -m pip --quiet show mani-skill >/dev/null 2>&1 && recipes+=(pushcube-ppo)
  for recipe in "${recipes[@]}"; do
    "$venv/bin/rlinf" train "$recipe" --output "$recipe" --run.num_steps 2 --run.evaluate_every 2 --run.checkpoint_every 2
  done
}

[ $# -ge 2 ] || usage
case "$1" in
  system) install_system_packages "$2" ;;
  requirements) install_requirements "$2" ;;
  packages) install_packages "$2" ;;
  venvs) create_venvs "${@:2}" ;;
  check) check "$2" ;;
  *) usage ;;
esac
