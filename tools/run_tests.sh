#!/usr/bin/env bash
# The project's tests, on the CPU. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
"$PYTHON" -m tools.fetch_wordnet
exec "$PYTHON" -m pytest "$@"
