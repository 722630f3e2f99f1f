#!/bin/sh
# The first start creates random passwords, and gives each volume to the user of its process. Later starts change nothing,
# except that they copy changed keys of an object store to the coordinator. Runs as root, without a network, and exits.
# FEDSSL_USER, by default 10001:10001, is that user and its group.
# Usage: secrets.sh [FOLDER], the folder of the mounted volumes, by default /.
set -eu
cd "${1:-/}"
user=${FEDSSL_USER:-10001:10001}
case $user in
  *[!0-9:]* | :* | *: | 0:* | *:0 | *:*:*) user= ;;
  *:*) ;;
  *) user= ;;
esac
if [ -z "$user" ]; then
  echo "error: FEDSSL_USER=$FEDSSL_USER is not the numbers of a user and a group other than root, such as 1000:1000" >&2
  exit 1
fi

random() { python -c 'import secrets; print(secrets.token_urlsafe(32), end="")'; }

# Write standard input to a file atomically: put FILE MODE
put() {
  umask 077
  cat >"$1.new"
  chmod "$2" "$1.new"
  mv "$1.new" "$1"
}

# The same, unless the file exists already: keep FILE MODE
keep() {
  if [ -s "$1" ]; then cat >/dev/null; else put "$1" "$2"; fi
}

# Postgres and Redis switch to their own users before they read these files. Only they have these volumes.
random | keep secrets/postgres/password 444
random | keep secrets/redis/password 444
printf 'requirepass %s\nappendonly yes\ndir /data\n' "$(cat secrets/redis/password)" | keep secrets/redis/redis.conf 444

if [ -d secrets/grafana ]; then
  random | keep secrets/grafana/password 444
  chmod 755 secrets/grafana
fi

# The bundled object store has its own keys. The coordinator's keys are those in keys/: the same ones, or yours, which are
# not changed. They are copied to the coordinator's other secrets.
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
chown -R "$user" secrets/coordinator
for volume in owned/*; do
  owner=$(stat -c %u:%g "$volume")
  # A folder of this machine that existed before keeps its owner.
  if [ "$volume" = owned/results ] && [ "$owner" != 0:0 ]; then continue; fi
  if [ "$owner" != "$user" ]; then chown -R "$user" "$volume"; fi
done
