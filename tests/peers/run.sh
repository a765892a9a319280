#!/usr/bin/env bash
# Ours and transformers in turn, on the same weights and as many cores; prints the ratios.
#
#   bash tests/peers/run.sh [SHARDS=demo/shards] [FOLDER_FOR_RESULTS]
#
# ROUNDS=3, STEPS=50, CONTEXT=256 and PEER_DTYPE=bfloat16 can be set. The peer gets a thread for each of our ranks'
# threads. On a CPU without AVX-512 torch has no fast bfloat16: PEER_DTYPE=float32 may be the fairer peer there.
set -euo pipefail

shards=$(realpath "${1:-demo/shards}")
results=$(realpath -m "${2:-$(mktemp -d)}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
rounds=${ROUNDS:-3} steps=${STEPS:-50} context=${CONTEXT:-256}
queue=(--requests 64 --input-len 32:128 --output-len 32:64)
ranks=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["ranks"])' <"$shards/manifest.json")
export NP=$ranks OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
threads=$((ranks * OMP_NUM_THREADS))

mkdir -p "$results/model"
python3 -m sharder.merge "$shards" -o "$results/model/model.safetensors"

for round in $(seq "$rounds"); do
    for kind in decode throughput; do
        flags=("${queue[@]}")
        if [[ $kind == decode ]]; then flags=(--batch-sizes '1,8,16' --context "$context" --steps "$steps"); fi
        bash run.sh bench "$kind" --shards "$shards" "${flags[@]}" --json "$results/$kind-ours-$round.json"
        OMP_NUM_THREADS=$threads python3 "tests/peers/${kind}_transformers.py" "$results/model" --threads "$threads" \
            --dtype "${PEER_DTYPE:-bfloat16}" "${flags[@]}" --json "$results/$kind-peer-$round.json" >/dev/null
    done
done
python3 tests/peers/compare.py "$results"
