#!/usr/bin/env bash
# Prints the tag of images built from this tree: the commit, plus a hash of uncommitted changes if there are any.
# Equal content has equal tags and different content different tags, so a tag never moves.
set -euo pipefail
cd "$(dirname "$0")/.."
content=(CMakeLists.txt LICENSE constraints.txt pyproject.toml images components kernels pipelines recmill)
commit=$(git rev-parse --short=12 HEAD)
changes=$(git status --porcelain -- "${content[@]}")
if [ -z "$changes" ]; then
  echo "$commit"
else
  hash=$({ git diff HEAD -- "${content[@]}"; git ls-files --others --exclude-standard -- "${content[@]}" | xargs -r cat; } | sha256sum)
  echo "$commit-${hash:0:8}"
fi
