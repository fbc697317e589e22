#!/usr/bin/env bash
# Prints the tag of images built from this tree: the commit, and where files differ from it a hash of what differs.
# The same content always has the same tag and other content another one, so a tag never moves.
set -euo pipefail
cd "$(dirname "$0")/.."
content=(CMakeLists.txt constraints.txt pyproject.toml images components kernels pipelines recmill)
commit=$(git rev-parse --short=12 HEAD)
changes=$(git status --porcelain -- "${content[@]}")
if [ -z "$changes" ]; then
  echo "$commit"
else
  hash=$({ git diff HEAD -- "${content[@]}"; git ls-files --others --exclude-standard -- "${content[@]}" | xargs -r cat; } | sha256sum)
  echo "$commit-${hash:0:8}"
fi
