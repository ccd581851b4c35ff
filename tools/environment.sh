# Sourced by run_rl_train.sh and tools/run_tests.sh, from the repository's root: sets PYTHON to an
# interpreter that has everything. PYTHON = interpreter to start from; VENV = folder of the virtual
# environment (default: the active one, else .venv; VENV= uses PYTHON as it is).
PYTHON=${PYTHON:-python3}
VENV=${VENV-${VIRTUAL_ENV:-.venv}}
if [ -n "$VENV" ]; then
    [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
    PYTHON=$VENV/bin/python
    NEEDED="torch transformers peft nltk pycocotools tensorboard pyarrow pytest xdist hypothesis datasets openai inflect ruff"
    CHECK="from importlib.util import find_spec; raise SystemExit(not all(map(find_spec, '$NEEDED'.split())))"
    if ! "$PYTHON" -c "$CHECK"; then
        echo "installing into $VENV"
        "$PYTHON" -m pip install -q -e ".[test]" -c constraints.txt
    fi
fi
# Once it is there, whether it works is what the training asks at its start.
[ -f "$(dirname "$PYTHON")/../nltk_data/corpora/wordnet/lexnames" ] || "$PYTHON" -m tools.fetch_wordnet
