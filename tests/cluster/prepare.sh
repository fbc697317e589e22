#!/usr/bin/env bash
# Builds the images of this tree and loads them into the nodes of the cluster that KUBECONFIG names; prints their tag last.
# Tags are digests of what the images are built from, so images that the nodes have are not built again.
# Two kinds of cluster are supported: kind, and the one-node cluster of RECMILL_CLUSTER_KIT (load.sh, base-image.sh),
# which has no registry and no Docker: there buildah builds on a base made by debootstrap. For any other, push the images
# to its registry and set RECMILL_TEST_TAG.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec 3>&1 1>&2
kubectl=${KUBECTL:-kubectl}
state=${KLAB_DIR:-$HOME/.cache/klab}
kit=${RECMILL_CLUSTER_KIT:-../shared/cluster}
tag=$(images/tag.sh)
postgres=$(images/tag.sh tests/cluster/postgres)
context=$("$kubectl" config current-context 2>/dev/null || true)

if [[ $context == kind-* ]]; then
  BUILDER=docker images/build.sh --tag "$tag"
  base=$(sed -n 's/^ARG BASE_IMAGE=//p' images/Dockerfile)
  docker build --build-arg "BASE_IMAGE=$base" --file tests/cluster/postgres/Dockerfile --tag "recmill/postgres:$postgres" .
  kind load docker-image --name "${context#kind-}" "recmill/"{data,trainer,mlflow,server}":$tag" "recmill/postgres:$postgres"
elif [ "$context" = klab ] && [ -f "$state/run/node-init.pid" ] && [ -x "$kit/load.sh" ]; then
  on_node() { nsenter -t "$(cat "$state/run/node-init.pid")" -m -n -p ctr -n k8s.io images "$@"; }
  loaded=$(on_node ls -q)
  missing=()
  for image in "postgres:$postgres" "mlflow:$tag" "trainer:$tag" "data:$tag" "server:$tag"; do
    grep -qx "docker.io/recmill/$image" <<<"$loaded" || missing+=("${image%%:*}")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    command -v buildah >/dev/null ||
      apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends buildah >/dev/null
    if [ -z "${BUILDAH_FLAGS:-}" ]; then
      BUILDAH_FLAGS="--storage-driver $(buildah --storage-driver overlay images >/dev/null 2>&1 && echo overlay || echo vfs)"
    fi
    export BUILDAH_FLAGS
    read -ra flags <<<"$BUILDAH_FLAGS"
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    if ! buildah "${flags[@]}" inspect --type image localhost/python:3.11 >/dev/null 2>&1; then
      "$kit/base-image.sh" "$scratch/base.tar"
      buildah "${flags[@]}" pull --quiet "oci-archive:$scratch/base.tar"
      rm "$scratch/base.tar"
    fi
    for name in "${missing[@]}"; do
      if [ "$name" = postgres ]; then
        buildah "${flags[@]}" bud --isolation chroot --layers --format docker --build-arg BASE_IMAGE=localhost/python:3.11 \
          --file tests/cluster/postgres/Dockerfile --tag "recmill/postgres:$postgres" .
        buildah "${flags[@]}" push --quiet "recmill/postgres:$postgres" \
          "docker-archive:$scratch/postgres.tar:recmill/postgres:$postgres"
      else
        BUILDER=buildah images/build.sh --tag "$tag" --base localhost/python:3.11 --archive "$scratch" "$name"
      fi
      "$kit/load.sh" "$scratch/$name.tar"
      rm "$scratch/$name.tar"
    done
    # Older images are gigabytes that nobody uses.
    while read -r image; do
      on_node rm "$image" >/dev/null </dev/null
      buildah "${flags[@]}" rmi "localhost/${image#*/}" >/dev/null 2>&1 </dev/null || true
    done < <(grep -E '^(docker.io|localhost)/recmill/' <<<"$loaded" | grep -vE ":($tag|$postgres)$")
  fi
else
  echo "prepare.sh: how to load images into the cluster '$context' is not known: push recmill/{data,trainer,mlflow,server}:$tag"
  echo "and recmill/postgres:$postgres where its nodes find them and set RECMILL_TEST_TAG=$tag"
  exit 1
fi
echo "$tag" >&3
