#!/usr/bin/env bash
# For each loop: draw scenes, train a base for each seed side by side, measure them, run their gauntlet.
# Seeds take turns on the GPUs of CUDA_VISIBLE_DEVICES, default the first. LOOPS=2: loop 2 alone.
# bash tools/experiments/base/bases.sh LIBRARY OUTPUT "0 1" [FLAGS of base train and base few_masks]
set -euo pipefail
LIBRARY=$1 OUTPUT=$2 SEEDS=$3
shift 3
PYTHON=${PYTHON:-python} WORKERS=${WORKERS:-6} SCENES=${SCENES:-} SAMPLES=${SAMPLES:-300} DTYPE=${DTYPE:-bfloat16}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
IFS=, read -ra GPUS <<<"${CUDA_VISIBLE_DEVICES-0}"
((${#GPUS[@]})) || GPUS=("") # no GPU
said() { echo "$SECONDS s: $*"; }

fail() { # logs that say why
    echo "bases.sh: failed, as these files say; when it is mended, run the same command again: $*" >&2
    exit 1
}

for_seeds() { # NAME FILE COMMAND, SEED in the last two stands for a seed: run side by side for the seeds that have no FILE yet
    local name=$1 made=$2 seed i pids=() logs=() failed=()
    shift 2
    for seed in $SEEDS; do
        [ ! -e "${made//SEED/$seed}" ] || continue
        logs+=("$folder/$name-$seed.log")
        CUDA_VISIBLE_DEVICES=${GPUS[${#pids[@]} % ${#GPUS[@]}]} "${@//SEED/$seed}" >>"${logs[-1]}" 2>&1 &
        pids+=($!)
    done
    for i in "${!pids[@]}"; do
        wait "${pids[i]}" || failed+=("${logs[i]}")
    done
    if ((${#failed[@]})); then fail "${failed[@]}"; fi
    said "loop $loop: $name is done"
}

settings="SEEDS=$SEEDS SCENES=$SCENES SAMPLES=$SAMPLES DTYPE=$DTYPE FLAGS=$*"
mkdir -p "$OUTPUT"
if [ -e "$OUTPUT/settings.txt" ] && [ "$settings" != "$(<"$OUTPUT/settings.txt")" ]; then
    echo "bases.sh: $OUTPUT was begun with $(<"$OUTPUT/settings.txt"), not $settings: name another folder" >&2
    exit 1
fi
echo "$settings" >"$OUTPUT/settings.txt"

for loop in ${LOOPS:-1 2}; do
    folder=$OUTPUT/loop$loop
    lab=$folder/lab
    mkdir -p "$folder"
    if [ "$loop" = 1 ]; then
        command=train of_scenes=() of_gauntlet=(--loop1_reward found)
    else # masks of one region in five, and scenes of their own
        command=few_masks of_scenes=(--seed 3 --caption_fraction .2 --num_artist_train 0 --num_eval 400)
        of_gauntlet=(--loop2_reward likelihood --loop2_measure pointed --without_places)
    fi
    # shellcheck disable=SC2086  # SCENES are flags
    "$PYTHON" -m tools.experiments.pictures scenes --library "$LIBRARY" --output_dir "$lab" --image_size 336 \
        --num_workers "${DRAWERS:-16}" "${of_scenes[@]}" $SCENES >>"$folder/scenes.log" 2>&1 || fail "$folder/scenes.log"
    said "loop $loop: scenes are drawn"
    for_seeds "$command" "$folder/SEED/base" "$PYTHON" -m tools.experiments.base "$command" --data_dir "$lab" --output_dir "$folder/SEED" \
        --seed SEED --num_workers "$WORKERS" --dtype "$DTYPE" "$@"
    for_seeds measure "$folder/measures-SEED.json" "$PYTHON" -m tools.experiments.base measure --data_dir "$lab" --model_path "$folder/SEED/base" \
        --output "$folder/measures-SEED.json" --num_samples "$SAMPLES" --num_workers 4 --dtype float32
    bases=() measures=()
    for seed in $SEEDS; do
        bases+=("$folder/$seed/base")
        measures+=("$folder/measures-$seed.json")
    done
    "$PYTHON" -m tools.experiments.base table "${measures[@]}" --output "$folder/measures.md" \
        >"$folder/table.log" 2>&1 || fail "$folder/table.log"
    if [ -e "$folder/gauntlet/table.md" ]; then continue; fi
    "$PYTHON" -m tools.experiments.gauntlet --model_path "${bases[@]}" --data_dir "$lab/train" --subsets segmented \
        --eval_data_dir "$lab/heldout" --max_completion_length 24 --num_workers 4 --batch_size 32 --num_samples "$SAMPLES" \
        --eval_samples "$SAMPLES" --dtype float32 --output_dir "$folder/gauntlet" --loops "$loop" "${of_gauntlet[@]}" \
        >"$folder/gauntlet.log" 2>&1 || fail "$folder/gauntlet.log"
    said "loop $loop: gauntlet is done"
done
