#!/bin/sh
# An object store over /data, with one bucket, for whoever has the keys.
set -eu
mkdir -p /data/artifacts
keys=/run/secrets/objects
# By the environment: arguments can be read by every process. In quotes, since it may hold a list.
RCLONE_AUTH_KEY="\"$(cat "$keys/fedssl_s3_access_key_id"),$(cat "$keys/fedssl_s3_secret_access_key")\""
export RCLONE_AUTH_KEY
# Parts of one object are kept in memory until it is whole: a listing would wait for what is being streamed.
exec rclone serve s3 --config /dev/null --addr 0.0.0.0:9000 --disable-multipart-streaming /data
