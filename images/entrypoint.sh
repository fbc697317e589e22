#!/bin/bash
# Runs the given command; `executor` starts a Spark executor the way Spark's Kubernetes backend expects.
set -euo pipefail

if [ "${1:-}" != executor ]; then
  exec "$@"
fi

# Spark passes the executor's Java options as SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, ...
java_options=()
while IFS= read -r name; do
  java_options+=("${!name}")
done < <(compgen -v | grep '^SPARK_JAVA_OPT_' | sort -t_ -k4 -n)

exec "${JAVA_HOME}/bin/java" "${java_options[@]}" \
  -Xms"${SPARK_EXECUTOR_MEMORY}" -Xmx"${SPARK_EXECUTOR_MEMORY}" \
  -cp "${SPARK_CLASSPATH:+${SPARK_CLASSPATH}:}${SPARK_HOME}/jars/*" \
  org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
  --driver-url "${SPARK_DRIVER_URL}" \
  --executor-id "${SPARK_EXECUTOR_ID}" \
  --cores "${SPARK_EXECUTOR_CORES}" \
  --app-id "${SPARK_APPLICATION_ID}" \
  --hostname "${SPARK_EXECUTOR_POD_IP}" \
  --resourceProfileId "${SPARK_RESOURCE_PROFILE_ID}" \
  --podName "${SPARK_EXECUTOR_POD_NAME}"
