#!/bin/sh
# First start: passwords that nobody has chosen, and volumes that belong to the processes that use them. Later starts
# change nothing. Runs as root, without a network, and ends.
set -eu

random() { python -c 'import secrets; print(secrets.token_urlsafe(32), end="")'; }

# Write standard input to a new file, which appears whole and only once: keep FILE MODE
keep() {
  if [ -s "$1" ]; then cat >/dev/null; return; fi
  umask 077
  cat >"$1.new"
  chmod "$2" "$1.new"
  mv "$1.new" "$1"
}

# Postgres and Redis change to users of their own before they read: their volumes are for them alone.
random | keep /secrets/postgres/password 444
random | keep /secrets/redis/password 444
printf 'requirepass %s\nappendonly yes\ndir /data\n' "$(cat /secrets/redis/password)" | keep /secrets/redis/redis.conf 444

if [ -d /secrets/grafana ]; then
  random | keep /secrets/grafana/password 444
  chmod 755 /secrets/grafana
fi

# The object store's keys, unless they are yours; the coordinator finds them among its own.
if [ -d /secrets/objects ]; then
  random | keep /secrets/objects/fedssl_s3_access_key_id 444
  random | keep /secrets/objects/fedssl_s3_secret_access_key 444
  chmod 755 /secrets/objects
  for name in fedssl_s3_access_key_id fedssl_s3_secret_access_key; do
    keep "/secrets/coordinator/$name" 400 <"/secrets/objects/$name"
  done
fi

umask 077
printf 'postgresql+psycopg://fedssl:%s@postgres:5432/fedssl' "$(cat /secrets/postgres/password)" |
  keep /secrets/coordinator/fedssl_database_url 400
printf 'redis://:%s@redis:6379/0' "$(cat /secrets/redis/password)" | keep /secrets/coordinator/fedssl_redis_url 400
chmod 755 /secrets/postgres /secrets/redis
chown -R 10001:10001 /secrets/coordinator
chown 10001:10001 /owned/*
