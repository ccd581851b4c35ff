#!/usr/bin/env bash
# The project's tests, on the CPU; sets the environment up if it has to. Arguments go to pytest.
# Two processes take a file of tests each (-n 0: one process, as `python -m pytest` has). A test that
# ends its process is run again by the next one, so only one process is replaced.
#
#   bash tools/run_tests.sh                              all of them, up to 15 minutes on two cores
#   bash tools/run_tests.sh tests/data                   those of a folder or file
#   VENV= PYTHON=python3 bash tools/run_tests.sh --gpu   on a machine with a GPU, by the packages that it has: the
#                                                        tests that need one, each benchmark of docs/ among them
#                                                        (without a network: NLTK_DATA=/a/copied/nltk_data)
set -euo pipefail
if [ "${1-}" = --help ] || [ "${1-}" = -h ]; then # before anything is installed
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
cd "$(dirname "$0")/.."
source tools/environment.sh
if [ "${1-}" = --gpu ]; then
    shift
    "$PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || fail "--gpu: torch finds no CUDA device here"
    TOGETHER=  # kernels are compiled by several processes, where pytest-xdist is installed
    if "$PYTHON" -c 'import xdist' 2>/dev/null; then TOGETHER="-n 3"; fi
    exec "$PYTHON" -m pytest -m gpu --durations 10 $TOGETHER "$@"
fi
exec "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 1 "$@"
