#!/usr/bin/env bash
# Builds the sdists of the packages with native code, then their wheels from those alone in an empty folder, and imports them. Catches a
# source that an sdist forgot.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/empty"
for package in rlinf-comm rlinf-sched; do
  .venv/bin/python -m build --no-isolation --sdist --outdir "$scratch" "packages/$package" >"$scratch/sdist.log" 2>&1 || { cat "$scratch/sdist.log"; exit 1; }
  (cd "$scratch/empty" && "$root/.venv/bin/python" -m pip --quiet wheel --no-build-isolation --no-deps -w "$scratch/wheel" "$scratch/${package/-/_}"-*.tar.gz)
done
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
print('the wheel from the sdist imports and works; CUDA kernels compiled in:', rlinf_comm.has_cuda_kernels())
from rlinf_sched import Cluster, FlowGraph, InstanceProfile, Problem, Profiles, Stage, StageProfile, TimePoint, plan_for_mode
from rlinf_sched.simulator import simulate
flow = FlowGraph(name='f', stages=(Stage(name='s', worker='s', role='actor', reads=('in',)),), feeds=('in',))
profile = StageProfile(instances=(InstanceProfile(points=(TimePoint(num_items=1, seconds=2.0),)),))
cluster = Cluster.cpu_slots(1)
problem = Problem(flow=flow, profiles=Profiles(stages={'s': profile}), cluster=cluster, num_items=3)
assert simulate(problem, plan_for_mode(flow, cluster, 'collocated', devices={})).total_s >= 6.0
print('and so does that of rlinf-sched')"
