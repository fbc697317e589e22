#!/usr/bin/env bash
# Starts (or completes) a kind cluster with Kubeflow Pipelines, Kubeflow Trainer, MLflow and recmill's images.
# Variables: KIND_CLUSTER, KUBECTL, IMAGE_TAG. Needs docker, kind, kubectl and the network.
set -euo pipefail
cd "$(dirname "$0")/.."
cluster=${KIND_CLUSTER:-recmill}
kubectl=${KUBECTL:-kubectl}
tag=${IMAGE_TAG:-$(images/tag.sh)}
for program in docker kind "$kubectl"; do
  command -v "$program" >/dev/null || { echo "kind-up: $program is missing" >&2; exit 1; }
done

kind get clusters | grep -qx "$cluster" || kind create cluster --name "$cluster" --wait 120s
KUBECONFIG=$(mktemp)
export KUBECONFIG
kind export kubeconfig --name "$cluster" # for this script only; the user's own kubeconfig is not changed
apply() { "$kubectl" apply --server-side --force-conflicts "$@"; }

images/build.sh --tag "$tag"
kind load docker-image --name "$cluster" "recmill/data:$tag" "recmill/trainer:$tag" "recmill/mlflow:$tag" \
  "recmill/server:$tag"

apply -k manifests/kubeflow/pipelines-crds
"$kubectl" wait --for condition=established --timeout 120s crd/applications.app.k8s.io
apply -k manifests/kubeflow/pipelines
apply -k manifests/kubeflow/trainer

# Set the tag in a copy: the overlay in the repository stays unchanged.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch" "$KUBECONFIG"' EXIT
cp -r manifests "$scratch/manifests"
sed -i "s/newTag: .*/newTag: $tag/" "$scratch/manifests/overlays/kind/kustomization.yaml"
"$kubectl" create namespace kubeflow --dry-run=client -o yaml | apply -f -
KUBECTL="$kubectl" manifests/secrets.sh kubeflow
apply -k "$scratch/manifests/overlays/kind"
"$kubectl" --namespace kubeflow rollout status --timeout 600s \
  statefulset/postgres deployment/mlflow deployment/ml-pipeline deployment/ml-pipeline-ui

.venv/bin/recmill compile --out build --image-tag "$tag"
cat <<NEXT

Ready. Kubeflow Pipelines: kubectl --namespace kubeflow port-forward service/ml-pipeline-ui 8080:80
Then: recmill submit --host http://localhost:8080 --image-tag $tag --wait
NEXT
