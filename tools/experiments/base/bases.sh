#!/usr/bin/env bash
# Draw the lab's scenes, train a base for each loop and seed side by side on one GPU, measure all of them.
# bash tools/experiments/base/bases.sh LIBRARY OUTPUT "0 1" [FLAGS of base train]
set -euo pipefail
LIBRARY=$1 OUTPUT=$2 SEEDS=$3
shift 3
PYTHON=${PYTHON:-python} WORKERS=${WORKERS:-6} SCENES=${SCENES:-} SAMPLES=${SAMPLES:-300} DTYPE=${DTYPE:-bfloat16} FEW=${FEW:-}
LAB=$OUTPUT/lab
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$OUTPUT"
said() { echo "$SECONDS s: $*"; }

# shellcheck disable=SC2086  # SCENES and FEW are flags
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
each few_masks "$PYTHON" -m tools.experiments.base few_masks --data_dir "$LAB" --base "$OUTPUT/SEED/base" \
    --output_dir "$OUTPUT/SEED/few_masks" --seed SEED --num_workers "$WORKERS" --dtype "$DTYPE" $FEW
for kind in base few_masks/base; do
    each "measure-${kind%/base}" "$PYTHON" -m tools.experiments.base measure --data_dir "$LAB" \
        --model_path "$OUTPUT/SEED/$kind" --output "$OUTPUT/measures-${kind%/base}-SEED.json" --num_samples "$SAMPLES" \
        --num_workers 4 --dtype float32
done
gauntlet() { # name of a log, folder of the bases, flags: one table of all seeds
    local name=$1 kind=$2 seed models=()
    shift 2
    for seed in $SEEDS; do models+=("$OUTPUT/$seed/$kind"); done
    "$PYTHON" -m tools.experiments.gauntlet --model_path "${models[@]}" --data_dir "$LAB/train" --subsets segmented \
        --eval_data_dir "$LAB/heldout" --max_completion_length 24 --num_workers 4 --batch_size 32 --num_samples "$SAMPLES" \
        --eval_samples "$SAMPLES" --dtype float32 --output_dir "$OUTPUT/$name" "$@" >"$OUTPUT/$name.log" 2>&1
    said "$name is done"
}
gauntlet gauntlet-loop1 base --loops 1 --loop1_reward found
gauntlet gauntlet-loop2 few_masks/base --loops 2 --loop2_reward likelihood --loop2_measure found --without_places
