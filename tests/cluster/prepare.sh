#!/usr/bin/env bash
# Builds the images of this tree and loads them into the nodes of the cluster that KUBECONFIG names; prints their tag last.
# Two kinds of cluster are supported: kind, and the one-node cluster of CLUSTER_TOOLS (up.sh, load.sh, base-image.sh),
# which has no registry and no Docker: there buildah builds on a base made by debootstrap. For any other, push the images
# to its registry and set RECMILL_TEST_TAG.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec 3>&1 1>&2
kubectl=${KUBECTL:-kubectl}
state=${KLAB_DIR:-$HOME/.cache/klab}
tools=${CLUSTER_TOOLS:-../shared/cluster}
if [ ! -x "$tools/load.sh" ] && [ -f "$state/run/node.pid" ]; then # beside the up.sh that is running
  up=$(tr '\0' '\n' <"/proc/$(cat "$state/run/node.pid")/cmdline" | grep '/up\.sh$' || true)
  tools=$(dirname "${up:-$tools/up.sh}")
fi
tag=$(images/tag.sh)
context=$("$kubectl" config current-context 2>/dev/null || true)

if [[ $context == kind-* ]]; then
  BUILDER=docker images/build.sh --tag "$tag"
  base=$(sed -n 's/^ARG BASE_IMAGE=//p' images/Dockerfile)
  docker build --build-arg "BASE_IMAGE=$base" --file tests/cluster/postgres/Dockerfile --tag "recmill/postgres:$tag" .
  kind load docker-image --name "${context#kind-}" "recmill/"{data,trainer,mlflow,postgres}":$tag"
elif [ "$context" = klab ] && [ -f "$state/run/node-init.pid" ] && [ -x "$tools/load.sh" ]; then
  init=$(cat "$state/run/node-init.pid")
  loaded=$(nsenter -t "$init" -m -n -p ctr -n k8s.io images ls -q)
  missing=()
  for name in postgres mlflow trainer data; do
    grep -qx "docker.io/recmill/$name:$tag" <<<"$loaded" || missing+=("$name")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    command -v buildah >/dev/null || apt-get install -y -qq --no-install-recommends buildah >/dev/null
    if [ -z "${BUILDAH_FLAGS:-}" ]; then
      BUILDAH_FLAGS="--storage-driver $(buildah --storage-driver overlay images >/dev/null 2>&1 && echo overlay || echo vfs)"
    fi
    export BUILDAH_FLAGS
    read -ra flags <<<"$BUILDAH_FLAGS"
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    if ! buildah "${flags[@]}" inspect --type image localhost/python:3.11 >/dev/null 2>&1; then
      "$tools/base-image.sh" "$scratch/base.tar"
      buildah "${flags[@]}" pull --quiet "oci-archive:$scratch/base.tar"
    fi
    for name in "${missing[@]}"; do
      if [ "$name" = postgres ]; then
        buildah "${flags[@]}" bud --isolation chroot --layers --format docker --build-arg BASE_IMAGE=localhost/python:3.11 \
          --file tests/cluster/postgres/Dockerfile --tag "recmill/postgres:$tag" .
        buildah "${flags[@]}" push --quiet "recmill/postgres:$tag" "docker-archive:$scratch/postgres.tar:recmill/postgres:$tag"
      else
        BUILDER=buildah images/build.sh --tag "$tag" --base localhost/python:3.11 --archive "$scratch" "$name"
      fi
      "$tools/load.sh" "$scratch/$name.tar"
      rm "$scratch/$name.tar"
    done
  fi
else
  echo "prepare.sh: how to load images into the cluster '$context' is not known: push recmill/{data,trainer,mlflow,postgres}:$tag"
  echo "where its nodes find them and set RECMILL_TEST_TAG=$tag"
  exit 1
fi
echo "$tag" >&3
