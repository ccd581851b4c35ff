#!/usr/bin/env bash
# The project's tests, on the CPU; sets the environment up if it has to. Arguments go to pytest.
# Two processes take a file of tests each (-n 0: one process, as `python -m pytest` has). A test that
# ends its process is run again by the next one, so only one process is replaced.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh
exec "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 1 "$@"
