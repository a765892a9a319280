#!/usr/bin/env bash
# Runs all GPU tests: each file by itself and the conformance suite under mpirun, several ranks on one GPU if need be.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
failed=0
for ranks in ${RANKS:-2 4}; do
    echo "== conformance, ranks: $ranks"
    mpirun --oversubscribe --bind-to none -np "$ranks" python3 -m pytest -q -x tests/gpu/test_comm_nccl.py || failed=1
done
for tests in kernels loading engine invariance demo; do
    echo "== $tests"
    python3 -m pytest -q "tests/gpu/test_${tests}_gpu.py" || failed=1
done
exit "$failed"
