#!/usr/bin/env bash
# tests/cluster/with-cluster.sh COMMAND... - runs a command with a cluster: the one that KUBECONFIG names or, if it is not
# set, that of the kit in RECMILL_CLUSTER_KIT (up.sh, down.sh, trainer/up.sh; default ../shared/cluster), which is started
# before and stopped afterwards. Images stay in the kit's state for the next time.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -z "${KUBECONFIG:-}" ] || exec "$@"

kit=${RECMILL_CLUSTER_KIT:-../shared/cluster}
if [ ! -x "$kit/up.sh" ]; then
  echo "no cluster: set KUBECONFIG to one, or RECMILL_CLUSTER_KIT to a folder whose up.sh starts one" >&2
  exit 2
fi
if [ "$(id -u)" != 0 ]; then
  echo "no cluster: $kit/up.sh needs root; set KUBECONFIG to use another cluster" >&2
  exit 2
fi
RECMILL_CLUSTER_KIT=$(cd "$kit" && pwd)
state=${KLAB_DIR:-$HOME/.cache/klab}
export RECMILL_CLUSTER_KIT KUBECONFIG="$state/run/admin.kubeconfig" PATH="$state/bin:$PATH"
if ! kill -0 "$(cat "$state/run/node.pid" 2>/dev/null || echo none)" 2>/dev/null; then
  trap '"$RECMILL_CLUSTER_KIT/down.sh" >&2' EXIT
fi
"$RECMILL_CLUSTER_KIT/up.sh" >&2
"$RECMILL_CLUSTER_KIT/trainer/up.sh" >&2
# As in manifests/kubeflow/trainer: pods may report their progress.
trainer=(--namespace kubeflow-system deployment/kubeflow-trainer-controller-manager)
if ! kubectl get "${trainer[@]}" --output jsonpath='{.spec.template.spec.containers[0].args}' | grep -q TrainJobStatus; then
  kubectl patch "${trainer[@]}" --type json --patch-file manifests/kubeflow/trainer/status-server.yaml >&2
  kubectl rollout status "${trainer[@]}" --timeout 180s >&2
fi
"$@"
