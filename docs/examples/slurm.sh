#!/usr/bin/env bash
# A training run under Slurm, on one node or several, that goes on after a time limit or a preemption.
# Submit it in the repository's root; what stands behind it are the flags of the run:
#   sbatch docs/examples/slurm.sh --model_path M --data_dir D --output_dir O
#   sbatch --nodes=4 --time=12:00:00 docs/examples/slurm.sh --model_path M --data_dir D --output_dir O
# Checkout, .venv and --output_dir lie on a disk that all nodes share.
#SBATCH --job-name=rl-sa2va
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
# One task a node: the launcher starts a process for each GPU. --signal reaches it 300 s before the time limit, which
# must be enough for a step and a checkpoint; at a preemption Slurm sends SIGTERM, and the partition's GraceTime must be.
#SBATCH --signal=USR1@300
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
trap : TERM USR1 # for the steps; this script waits for them

# shellcheck source=tools/environment.sh disable=SC1091
(source tools/environment.sh) # here alone, so that not every node makes .venv
NNODES=$SLURM_JOB_NUM_NODES
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # not head: pipefail
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # two jobs may share a node
export NNODES MASTER_ADDR MASTER_PORT

# A node whose launcher has ended must not cut another one's checkpoint short: --kill-on-bad-exit=0. After a crash the
# others end by themselves, as docs/reliability.md says.
# shellcheck disable=SC2016  # SLURM_NODEID is known on each node only
srun --kill-on-bad-exit=0 bash -c 'NODE_RANK=$SLURM_NODEID exec bash run_rl_train.sh "$@"' run "$@" --resume auto &
steps=$!
while kill -0 "$steps" 2>/dev/null; do # a trapped signal ends `wait` too
    wait "$steps" || true
done
status=0
wait "$steps" || status=$? # bash remembers it

# 75: a signal stopped the run, with a checkpoint. A job that was cancelled is no longer RUNNING and stays away.
if [ "$status" -eq 75 ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    echo "stopped with a checkpoint: requeue of job $SLURM_JOB_ID"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
