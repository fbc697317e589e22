#!/usr/bin/env bash
# manifests/secrets.sh NAMESPACE: creates the secrets that the manifests name, with random passwords, if they are missing.
# No password is written to a file of the repository; a cluster with a secret manager creates them there instead.
set -euo pipefail
namespace=${1:?the namespace}
kubectl=${KUBECTL:-kubectl}

exists() { "$kubectl" --namespace "$namespace" get secret "$1" >/dev/null 2>&1; }
random() { python3 -c 'import secrets; print(secrets.token_hex(24), end="")'; }

if exists recmill-postgres && exists recmill-mlflow && exists recmill-mlflow-server; then
  echo "secrets of $namespace are there" >&2
  exit 0
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 700 "$scratch"
random >"$scratch/password"
random >"$scratch/MLFLOW_TRACKING_PASSWORD"
printf admin >"$scratch/MLFLOW_TRACKING_USERNAME"
random >"$scratch/MLFLOW_FLASK_SERVER_SECRET_KEY"
printf 'postgresql+psycopg2://mlflow:%s@postgres:5432/mlflow' "$(cat "$scratch/password")" >"$scratch/MLFLOW_BACKEND_STORE_URI"
cat >"$scratch/auth.ini" <<INI
[mlflow]
default_permission = READ
database_uri = $(cat "$scratch/MLFLOW_BACKEND_STORE_URI")
admin_username = admin
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
auth_cache_ttl_seconds = 60
INI

make() {
  local name=$1 file
  shift
  local files=()
  for file in "$@"; do files+=("--from-file=$scratch/$file"); done
  "$kubectl" --namespace "$namespace" create secret generic "$name" "${files[@]}"
}
make recmill-postgres password
make recmill-mlflow MLFLOW_TRACKING_USERNAME MLFLOW_TRACKING_PASSWORD
make recmill-mlflow-server MLFLOW_BACKEND_STORE_URI MLFLOW_FLASK_SERVER_SECRET_KEY auth.ini
