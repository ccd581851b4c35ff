#!/usr/bin/env bash
# Train Sa2VA by reinforcement learning. The only launcher.
#
#   bash run_rl_train.sh                         the demo: environment, drawn data, tiny Sa2VA, both loops, on any machine
#   bash run_rl_train.sh --model_path M --data_dir D --output_dir O [flags of rl_train.train]
#                                                the real job, on every GPU of this machine
#
# Environment: PYTHON and VENV (see tools/environment.sh), NPROC (processes; default: one per GPU), and for several machines
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT as torchrun knows them.
# Running it again continues an unfinished demo run. It deletes nothing, and exits with the status of the training.
set -euo pipefail
cd "$(dirname "$0")"

source tools/environment.sh

GPUS=$("$PYTHON" -c "import torch; print(torch.cuda.device_count())")
NPROC=${NPROC:-$(( GPUS > 0 ? GPUS : 1 ))}

if [ $# -eq 0 ]; then
    DEMO=outputs/demo
    RUN=outputs/demo_run
    "$PYTHON" -m tools.make_demo --output_dir "$DEMO"
    NPROC=1
    set -- --model_path "$DEMO/checkpoint" --data_dir "$DEMO/train" --eval_data_dir "$DEMO/heldout" --output_dir "$RUN" \
        --dtype float32 --lora_r 16 --lora_alpha 32 --max_completion_length 32 --micro_batch_size 32 --batch_size 4 \
        --num_generations 8 --learning_rate 1.5e-4 --prompt_learning_rate 1e-3 --kl_coef 0.02 \
        --no-gradient_checkpointing --num_workers 1 --max_steps 160 --eval_samples 128 --eval_steps 80 --save_steps 40
    if [ -f "$RUN/config.json" ]; then set -- "$@" --resume; fi
fi

if [ "$NPROC" -eq 1 ] && [ "${NNODES:-1}" -eq 1 ]; then
    exec "$PYTHON" -m rl_train.train "$@"
fi
exec "$PYTHON" -m torch.distributed.run --nproc_per_node "$NPROC" --nnodes "${NNODES:-1}" --node_rank "${NODE_RANK:-0}" \
    --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "${MASTER_PORT:-29500}" -m rl_train.train "$@"
