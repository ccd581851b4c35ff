#!/usr/bin/env bash
# Train Sa2VA by reinforcement learning. The only launcher: `bash run_rl_train.sh --help`.
# It deletes nothing but a run's own older checkpoints (--save_total_limit), and says so.
# Exit status: rl_train/distributed/launch.py.
set -euo pipefail
cd "$(dirname "$0")"

usage() {
    cat <<'END'
usage: bash run_rl_train.sh [WORD] [FLAGS]

Without WORD, the real job on every GPU of this machine:
  bash run_rl_train.sh --model_path M --data_dir D --output_dir O [FLAGS]
With WORD:
  demo         tiny Sa2VA on drawn data, both loops, on any machine; so does the command without any argument
  points       tiny Qwen2.5-VL and SAM2 on drawn data, positive and negative points, on any machine
  supervised   supervised training, whose final_model is then a --model_path: supervised --model_path M --data_dir D ..

FLAGS come last, behind a demo's own too: bash run_rl_train.sh points --max_steps 5 --output_dir outputs/short
All of them: bash run_rl_train.sh --model_path M --help (of supervised training: supervised --help). Of the launcher:
  --max_restarts N   after a crash start again from the last checkpoint, N times at most (not after bad input)
  --resume auto      start the run of --output_dir or continue it: a command to queue again

Environment (VARIABLE=value bash run_rl_train.sh ..):
  PYTHON       interpreter to start from, 3.11 or newer: PYTHON=/usr/bin/python3.12; default: python3, or a newer one
  VENV         folder of the virtual environment: VENV=/scratch/venv; default: the active one, else .venv, which is
               made and filled at the first start; VENV= (empty) uses PYTHON as it is and installs nothing
  NPROC        processes on this machine: NPROC=4; default: one per GPU
  CUDA_VISIBLE_DEVICES      GPUs to use: CUDA_VISIBLE_DEVICES=0,1
  NNODES, NODE_RANK         number of machines and this one's number: NNODES=2 NODE_RANK=0 on the first of two
  MASTER_ADDR, MASTER_PORT  where they meet: MASTER_ADDR=node0 MASTER_PORT=29500
  HF_TOKEN, HF_HOME         access to models and data on the hub, and where they are kept
  OPENAI_API_KEY            of the LLM judge (--use_llm_judge); WANDB_MODE=offline: of --wandb

Exit status: 0; 2 for what one sentence names (bad input, no memory, a full disk, ..); 75 after a signal, with a
checkpoint unless before step 1; else that of what failed.
END
}

case "${1-}" in
-h | --help)
    usage
    exit 0
    ;;
demo | points)
    WORD=$1
    shift
    case "${1-}" in -h | --help) usage && exit 0 ;; esac
    ;;
supervised)
    WORD=supervised
    ;;
"")
    WORD=demo
    set --
    ;;
-*)
    WORD=
    ;;
*)
    case "$1" in
    d*) NEAREST="did you mean demo?" ;;
    p*) NEAREST="did you mean points?" ;;
    s*) NEAREST="did you mean supervised?" ;;
    h*) NEAREST="did you mean --help?" ;;
    *) NEAREST="the words are demo, points, supervised" ;;
    esac
    echo "run_rl_train.sh: unknown word $1; $NEAREST (bash run_rl_train.sh --help)" >&2
    exit 2
    ;;
esac

source tools/environment.sh

if [ "$WORD" = demo ]; then
    DEMO=outputs/demo
    RUN=outputs/demo_run
    "$PYTHON" -m tools.demo.make_demo --output_dir "$DEMO"
    export NPROC=1
    set -- --model_path "$DEMO/checkpoint" --data_dir "$DEMO/train" --eval_data_dir "$DEMO/heldout" --output_dir "$RUN" \
        --attributes "$DEMO/attributes.json" --distractors \
        --dtype float32 --lora_r 16 --lora_alpha 32 --max_completion_length 24 --micro_batch_size 64 --batch_size 8 \
        --num_generations 8 --learning_rate 1.5e-3 --text_hidden_fcs_lr 1e-3 --kl_coef 0.06 --mask_loss_coef 0 \
        --no-gradient_checkpointing --num_workers 1 --max_steps 240 --eval_samples 128 --eval_steps 120 --save_steps 60 --resume auto "$@"
elif [ "$WORD" = points ]; then
    DEMO=outputs/points_demo
    "$PYTHON" -m tools.demo.make_points_demo --output_dir "$DEMO"
    export NPROC=1
    set -- --tasks point_segmentation --answer_style points --image_size 96 --model_path "$DEMO/qwen" --sam_path "$DEMO/sam" \
        --data_dir "$DEMO/train" --eval_data_dir "$DEMO/heldout" --output_dir outputs/points_demo_run \
        --dtype float32 --lora_r 16 --lora_alpha 32 --max_completion_length 32 --micro_batch_size 32 --batch_size 4 \
        --num_generations 8 --learning_rate 1e-3 --kl_coef 0.02 \
        --no-gradient_checkpointing --num_workers 1 --max_steps 80 --eval_samples 128 --eval_steps 40 --save_steps 40 --resume auto "$@"
fi

MODULE=rl_train.train
case "$WORD" in
demo | points) MODULE=tools.demo.train ;;
supervised) MODULE=rl_train.sft && shift ;;
esac
exec "$PYTHON" -m rl_train.distributed.launch -m $MODULE "$@"  # signals reach it
