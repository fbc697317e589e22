#!/usr/bin/env bash
# images/tag.sh [PATH...] - prints the tag of images built from this tree: a digest of the files that they are built from,
# committed or not (or of PATH...). Equal content has equal tags and different content different tags, so a tag never moves.
set -euo pipefail
cd "$(dirname "$0")/.."
content=("$@")
[ $# -gt 0 ] || content=(CMakeLists.txt LICENSE pyproject.toml components kernels pipelines recmill images/Dockerfile images/entrypoint.sh
  requirements/sbom.py requirements/{build,image-cpu,image-cuda,kernels,mlflow,server,spark,torch-cpu,torch-cuda}.txt)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export GIT_INDEX_FILE=$scratch/index # an index of these files only; the user's own is not touched
git add --all -- "${content[@]}"
tree=$(git write-tree)
echo "${tree:0:16}"
