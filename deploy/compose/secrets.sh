#!/bin/sh
# First start: passwords that nobody has chosen, and volumes that belong to the processes that use them. Later starts
# change nothing, but that other keys of an object store reach the coordinator. Runs as root, without a network, and ends.
# secrets.sh [FOLDER]: where the volumes are mounted, / unless it is said.
set -eu
cd "${1:-/}"

random() { python -c 'import secrets; print(secrets.token_urlsafe(32), end="")'; }

# Write standard input to a file, which appears whole: put FILE MODE
put() {
  umask 077
  cat >"$1.new"
  chmod "$2" "$1.new"
  mv "$1.new" "$1"
}

# The same, only once: keep FILE MODE
keep() {
  if [ -s "$1" ]; then cat >/dev/null; else put "$1" "$2"; fi
}

# Postgres and Redis change to users of their own before they read: their volumes are for them alone.
random | keep secrets/postgres/password 444
random | keep secrets/redis/password 444
printf 'requirepass %s\nappendonly yes\ndir /data\n' "$(cat secrets/redis/password)" | keep secrets/redis/redis.conf 444

if [ -d secrets/grafana ]; then
  random | keep secrets/grafana/password 444
  chmod 755 secrets/grafana
fi

# The object store that is brought along has keys of its own. The coordinator's are those in keys/: the same, or yours,
# which stay as they are; it finds them among its other secrets.
if [ -d secrets/objects ]; then
  for name in fedssl_s3_access_key_id fedssl_s3_secret_access_key; do
    random | keep "secrets/objects/$name" 444
    if [ ! -s "keys/$name" ]; then
      echo "error: the folder that FEDSSL_S3_KEYS names has no $name, or it is empty" >&2
      exit 1
    fi
    cmp -s "keys/$name" "secrets/coordinator/$name" || put "secrets/coordinator/$name" 400 <"keys/$name"
  done
  chmod 755 secrets/objects
fi

umask 077
printf 'postgresql+psycopg://fedssl:%s@postgres:5432/fedssl' "$(cat secrets/postgres/password)" |
  keep secrets/coordinator/fedssl_database_url 400
printf 'redis://:%s@redis:6379/0' "$(cat secrets/redis/password)" | keep secrets/coordinator/fedssl_redis_url 400
chmod 755 secrets/postgres secrets/redis
chown -R 10001:10001 secrets/coordinator
chown 10001:10001 owned/*
