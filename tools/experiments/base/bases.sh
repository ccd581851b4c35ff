#!/usr/bin/env bash
# Draw the lab's scenes, train one base per seed side by side on one GPU, and measure all of them.
# bash tools/experiments/base/bases.sh LIBRARY OUTPUT "0 1" [FLAGS of base train]
set -euo pipefail
LIBRARY=$1 OUTPUT=$2 SEEDS=$3
shift 3
PYTHON=${PYTHON:-python} WORKERS=${WORKERS:-6} SCENES=${SCENES:-} SAMPLES=${SAMPLES:-300} DTYPE=${DTYPE:-bfloat16}
LAB=$OUTPUT/lab
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$OUTPUT"
said() { echo "$SECONDS s: $*"; }

# shellcheck disable=SC2086  # SCENES are flags
"$PYTHON" -m tools.experiments.pictures scenes --library "$LIBRARY" --output_dir "$LAB" --image_size 336 \
    --num_workers "${DRAWERS:-16}" $SCENES >"$OUTPUT/scenes.log" 2>&1
said "scenes are drawn"

each() { # name of a log, command with SEED in it: run for all seeds side by side, wait for all of them
    local name=$1 seed pids=()
    shift
    for seed in $SEEDS; do
        "${@//SEED/$seed}" >"$OUTPUT/$name-$seed.log" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid"; done
    said "$name is done"
}
each train "$PYTHON" -m tools.experiments.base train --data_dir "$LAB" --output_dir "$OUTPUT/SEED" --seed SEED \
    --num_workers "$WORKERS" --dtype "$DTYPE" "$@"
each measure "$PYTHON" -m tools.experiments.base measure --data_dir "$LAB" --model_path "$OUTPUT/SEED/base" \
    --output "$OUTPUT/measures-SEED.json" --num_samples "$SAMPLES" --num_workers 4 --dtype "$DTYPE"
each gauntlet "$PYTHON" -m tools.experiments.gauntlet --data_dir "$LAB/train" --subsets segmented \
    --eval_data_dir "$LAB/heldout" --max_completion_length 24 --num_workers 4 --batch_size 32 \
    --num_samples "$SAMPLES" --eval_samples "$SAMPLES" --dtype "$DTYPE" --model_path "$OUTPUT/SEED/base" \
    --output_dir "$OUTPUT/gauntlet-SEED"
