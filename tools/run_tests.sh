#!/usr/bin/env bash
# The project's tests, on the CPU; sets the environment up if it has to. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh
exec "$PYTHON" -m pytest "$@"
