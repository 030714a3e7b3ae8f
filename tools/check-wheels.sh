#!/usr/bin/env bash
# Builds every wheel from its sdist (tools/build-wheels.sh) and runs the native ones in an environment without torch.
# Catches a source that an sdist forgot, a wheel without its licence, a tag that promises too much.
#   tools/check-wheels.sh [--optimized]    compiled as for a release; by default without optimizing, which is quicker
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
case "${1:-}" in
  "") native=(--unoptimized) ;;
  --optimized) native=() ;;
  *) fail "usage: tools/check-wheels.sh [--optimized]" ;;
esac
ensure_environment
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
tools/build-wheels.sh "$scratch/wheels" "${native[@]}"
.venv/bin/python -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip --quiet --disable-pip-version-check install numpy lazy-loader # torch is needed only for tensors
"$scratch/venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps "$scratch"/wheels/rlinf_{comm,sched}-*.whl
cd "$scratch"
"$scratch/venv/bin/python" -c "
import rlinf_comm
from rlinf_comm.channel import Channel
channel = Channel.create('check')
channel.put({'number': 7})
assert channel.take()[0].value == {'number': 7}
print('the wheel of rlinf-comm imports and works; CUDA kernels compiled in:', rlinf_comm.has_cuda_kernels())
from rlinf_sched import Cluster, FlowGraph, InstanceProfile, Problem, Profiles, Stage, StageProfile, TimePoint, plan_for_mode
from rlinf_sched.simulator import simulate
flow = FlowGraph(name='f', stages=(Stage(name='s', worker='s', role='actor', reads=('in',)),), feeds=('in',))
profile = StageProfile(instances=(InstanceProfile(points=(TimePoint(num_items=1, seconds=2.0),)),))
cluster = Cluster.cpu_slots(1)
problem = Problem(flow=flow, profiles=Profiles(stages={'s': profile}), cluster=cluster, num_items=3)
assert simulate(problem, plan_for_mode(flow, cluster, 'collocated', devices={})).total_s >= 6.0
print('and so does that of rlinf-sched')"
