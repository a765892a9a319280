#!/usr/bin/env bash
# Runs all GPU tests side by side, for most of their time is compiling; the communicators' under mpirun, several ranks
# on one GPU if need be. What failed is shown at the end, then a line for each part.
#   RANKS="2 4"    rank counts of the communicators' tests
#   LOGS=FOLDER    keeps the whole output
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
    start "$name" python3 -m pytest -q -rfE --durations=5 "tests/gpu/test_${file}_gpu.py" "$@"
}

test_file kernels-attention kernels -k attention
test_file kernels-others kernels -k "not attention"
test_file promises promises
test_file engine-float32 engine -k float32
test_file engine-others engine -k "not float32"
test_file loading loading
test_file invariance invariance
test_file demo demo
test_file doctor doctor
for ranks in ${RANKS:-2 4}; do
    start "comm-$ranks" mpirun --oversubscribe --bind-to none -np "$ranks" \
        python3 -m pytest -q -x tests/gpu/test_comm_nccl.py tests/gpu/test_doctor_gpu.py
done

failed=0 summary=""
for index in "${!pids[@]}"; do
    name=${names[index]} result=ok
    wait "${pids[index]}" || result=FAILED
    summary+=$(printf '%-6s  %-17s  %s' "$result" "$name" "$(tail -n 1 "$logs/$name.log")")$'\n'
    if [ "$result" = FAILED ]; then
        failed=1
        echo "== $name"
        tail -n 60 "$logs/$name.log"
    fi
done
printf '%s' "$summary"
exit "$failed"
