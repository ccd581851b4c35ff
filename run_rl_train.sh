#!/usr/bin/env bash
# Train Sa2VA by reinforcement learning. The only launcher.
#
#   bash run_rl_train.sh                         the demo: environment, drawn data, tiny Sa2VA, both loops, on any machine
#   bash run_rl_train.sh points                  the demo of points: a tiny Qwen2.5-VL and SAM2, positive and negative points
#   bash run_rl_train.sh supervised --model_path M ..  supervised training, whose final_model is the next line's M (docs/supervised.md)
#   bash run_rl_train.sh --model_path M --data_dir D --output_dir O [flags of rl_train.train]
#                                                the real job, on every GPU of this machine
#       .. --max_restarts N                      after a crash goes on from the last checkpoint, N times at most
#       .. --resume auto                         starts a run, or continues that of --output_dir: a command to queue again
#
# Environment: PYTHON and VENV (see tools/environment.sh), NPROC (processes; default: one per GPU), and for several machines
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT as torchrun knows them (docs/real_run.md).
# Running it again continues an unfinished demo run. It deletes nothing. Exit status: rl_train/distributed/launch.py.
set -euo pipefail
cd "$(dirname "$0")"

source tools/environment.sh

if [ $# -eq 0 ]; then
    DEMO=outputs/demo
    RUN=outputs/demo_run
    "$PYTHON" -m tools.demo.make_demo --output_dir "$DEMO"
    export NPROC=1
    set -- --model_path "$DEMO/checkpoint" --data_dir "$DEMO/train" --eval_data_dir "$DEMO/heldout" --output_dir "$RUN" \
        --attributes "$DEMO/attributes.json" --distractors \
        --dtype float32 --lora_r 16 --lora_alpha 32 --max_completion_length 24 --micro_batch_size 64 --batch_size 8 \
        --num_generations 8 --learning_rate 6e-4 --text_hidden_fcs_lr 1e-3 --kl_coef 0.06 \
        --no-gradient_checkpointing --num_workers 1 --max_steps 120 --eval_samples 128 --eval_steps 60 --save_steps 30 --resume auto
elif [ "$*" = points ]; then
    DEMO=outputs/points_demo
    "$PYTHON" -m tools.demo.make_points_demo --output_dir "$DEMO"
    export NPROC=1
    set -- --tasks point_segmentation --answer_style points --image_size 96 --model_path "$DEMO/qwen" --sam_path "$DEMO/sam" \
        --data_dir "$DEMO/train" --eval_data_dir "$DEMO/heldout" --output_dir outputs/points_demo_run \
        --dtype float32 --lora_r 16 --lora_alpha 32 --max_completion_length 32 --micro_batch_size 32 --batch_size 4 \
        --num_generations 8 --learning_rate 1e-3 --kl_coef 0.02 \
        --no-gradient_checkpointing --num_workers 1 --max_steps 80 --eval_samples 128 --eval_steps 40 --save_steps 40 --resume auto
fi

MODULE=rl_train.train
if [ "${1-}" = supervised ]; then
    MODULE=rl_train.sft
    shift
fi
exec "$PYTHON" -m rl_train.distributed.launch -m $MODULE "$@"  # signals reach it
