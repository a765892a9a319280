#!/usr/bin/env bash
# Runs all GPU tests side by side, most of whose time is compiling: kernels, engine and programs each by themselves, the
# communicators under mpirun, several ranks on one GPU if need be. Failures and a summary come last.
# RANKS="2 4": rank counts of the communicators' tests. LOGS: where the output is kept.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
logs=${LOGS:-$(mktemp -d)}
names=() pids=()

start() {
    local name=$1
    shift
    "$@" >"$logs/$name.log" 2>&1 &
    names+=("$name") pids+=($!)
}

test_file() {
    local name=$1 file=$2
    shift 2
    start "$name" python3 -m pytest -q -rfEs --durations=5 "tests/gpu/test_${file}_gpu.py" "$@"
}

test_file kernels-float32 kernels -k float32
test_file kernels-attention kernels -k "attention and not float32"
test_file kernels-others kernels -k "not attention and not float32"
test_file engine-float32 engine -k float32
test_file engine-others engine -k "not float32"
test_file invariance invariance
test_file demo demo
for ranks in ${RANKS:-2 4}; do
    start "comm-$ranks" mpirun --oversubscribe --bind-to none -np "$ranks" \
        python3 -m pytest -q -x tests/gpu/test_comm_nccl.py
done
test_file kernels-attention kernels -k attention
test_file kernels-others kernels -k "not attention"
test_file promises promises
test_file engine-float32 engine -k float32
test_file engine-others engine -k "not float32"
test_file loading loading
test_file invariance invariance
test_file demo demo
exit "$failed"
