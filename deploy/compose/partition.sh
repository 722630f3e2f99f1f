#!/bin/sh
# Download the data set of the spec's [partition] and partition it, once: partition.sh SPEC CLIENT ...
set -eu
spec=$1
shift
for client in "$@"; do
  if [ ! -e "/shards/$client/images.npz" ]; then
    exec fedssl partition "$spec" --shards /shards
  fi
done
