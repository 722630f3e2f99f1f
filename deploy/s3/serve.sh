#!/bin/sh
# Serve /data as an object store with one bucket, to clients with the keys.
set -eu
mkdir -p /data/artifacts
keys=/run/secrets/objects
# Passed in the environment, because every process can read arguments. Quoted, because the value may be a list.
RCLONE_AUTH_KEY="\"$(cat "$keys/fedssl_s3_access_key_id"),$(cat "$keys/fedssl_s3_secret_access_key")\""
export RCLONE_AUTH_KEY
# Keep the parts of an object in memory until it is complete: with streaming, a listing would wait for open uploads.
exec rclone serve s3 --config /dev/null --addr 0.0.0.0:9000 --disable-multipart-streaming /data
