#!/bin/bash
# What the official image's entrypoint does with POSTGRES_USER, POSTGRES_DB, POSTGRES_PASSWORD_FILE and PGDATA.
set -euo pipefail
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" --auth=scram-sha-256 --encoding=UTF8 >&2
  echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
  pg_ctl --options="-c listen_addresses=''" --wait start >&2
  PGPASSWORD=$(cat "$POSTGRES_PASSWORD_FILE") createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
  pg_ctl --mode=fast --wait stop >&2
fi
exec postgres -c listen_addresses='*'
