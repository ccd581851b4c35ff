#!/bin/bash
# Make an environment FOLDER/VERSION for each version of transformers that test_versions.py runs:
#   bash tests/export/make_versions.sh FOLDER && VERSIONS_DIR=FOLDER python -m pytest -m versions
# Torchvision's wheel is for CUDA; it serves beside a CPU's torch because run_folder.py declares
# the two operators that its import asks for.
set -euo pipefail
folder=${1:?usage: make_versions.sh FOLDER}
python=${PYTHON:-python3.11}
torch=${TORCH:-2.13.0} torchvision=${TORCHVISION:-0.28.0}
for version in 4.49.0 4.51.3 4.57.1 5.17.0; do
  environment=$folder/$version
  [ -f "$environment/complete" ] && continue
  "$python" -m venv --clear "$environment"
  "$environment/bin/pip" install --quiet "transformers==$version" "torch==$torch" numpy pillow
  case $version in
    4.49.* | 4.51.*) ;; # no processor of theirs needs torchvision
    *) "$environment/bin/pip" install --quiet --no-deps "torchvision==$torchvision" ;;
  esac
  touch "$environment/complete"
done
