#!/usr/bin/env bash
# Draw scenes for each loop, train a base for each loop and seed side by side, measure all of them.
# Seeds take turns on the GPUs of CUDA_VISIBLE_DEVICES, default the first.
# bash tools/experiments/base/bases.sh LIBRARY OUTPUT "0 1" [FLAGS of base train and base few_masks]
set -euo pipefail
LIBRARY=$1 OUTPUT=$2 SEEDS=$3
shift 3
PYTHON=${PYTHON:-python} WORKERS=${WORKERS:-6} SCENES=${SCENES:-} SAMPLES=${SAMPLES:-300} DTYPE=${DTYPE:-bfloat16}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
IFS=, read -ra GPUS <<<"${CUDA_VISIBLE_DEVICES-0}"
((${#GPUS[@]})) || GPUS=("") # no GPU
mkdir -p "$OUTPUT"
said() { echo "$SECONDS s: $*"; }

draw() { # name of a folder of scenes, flags
    local folder=$OUTPUT/$1
    shift
    # shellcheck disable=SC2086  # SCENES are flags
    "$PYTHON" -m tools.experiments.pictures scenes --library "$LIBRARY" --output_dir "$folder" --image_size 336 \
        --num_workers "${DRAWERS:-16}" "$@" $SCENES >>"$OUTPUT/scenes.log" 2>&1
}
draw lab
# Loop 2's bases have masks of one region in five, and scenes of their own.
draw lab_loop2 --seed 3 --caption_fraction .2 --num_artist_train 0 --num_eval 400
said "scenes are drawn"

each() { # name of a log, command with SEED in it: run for all seeds side by side, wait for all of them
    local name=$1 seed pids=()
    shift
    for seed in $SEEDS; do
        CUDA_VISIBLE_DEVICES=${GPUS[${#pids[@]} % ${#GPUS[@]}]} "${@//SEED/$seed}" >"$OUTPUT/$name-$seed.log" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid"; done
    said "$name is done"
}
each train "$PYTHON" -m tools.experiments.base train --data_dir "$OUTPUT/lab" --output_dir "$OUTPUT/SEED" --seed SEED \
    --num_workers "$WORKERS" --dtype "$DTYPE" "$@"
each few_masks "$PYTHON" -m tools.experiments.base few_masks --data_dir "$OUTPUT/lab_loop2" --output_dir "$OUTPUT/SEED/few_masks" --seed SEED \
    --num_workers "$WORKERS" --dtype "$DTYPE" "$@"

measure() { # name of a kind of bases, its folder below SEED, its scenes, flags of the gauntlet: each seed's measures, one table of all
    local name=$1 kind=$2 lab=$OUTPUT/$3 seed models=()
    shift 3
    each "measure-$name" "$PYTHON" -m tools.experiments.base measure --data_dir "$lab" --model_path "$OUTPUT/SEED/$kind" \
        --output "$OUTPUT/measures-$name-SEED.json" --num_samples "$SAMPLES" --num_workers 4 --dtype float32
    for seed in $SEEDS; do models+=("$OUTPUT/$seed/$kind"); done
    "$PYTHON" -m tools.experiments.gauntlet --model_path "${models[@]}" --data_dir "$lab/train" --subsets segmented \
        --eval_data_dir "$lab/heldout" --max_completion_length 24 --num_workers 4 --batch_size 32 --num_samples "$SAMPLES" \
        --eval_samples "$SAMPLES" --dtype float32 --output_dir "$OUTPUT/gauntlet-$name" "$@" >"$OUTPUT/gauntlet-$name.log" 2>&1
    said "gauntlet-$name is done"
}
measure loop1 base lab --loops 1 --loop1_reward found
measure loop2 few_masks/base lab_loop2 --loops 2 --loop2_reward likelihood --loop2_measure pointed --without_places
