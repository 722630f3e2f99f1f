#!/bin/sh
# Create a token with a role and store it in a file, once: token.sh ROLE FILE [MODE]
set -eu
umask 077
[ -s "$2" ] && exit 0
fedssl-coordinator token create --role "$1" --label compose >"$2.new"
chmod "${3:-400}" "$2.new"
mv "$2.new" "$2"
