#!/bin/sh
# Create an enrolment token for each worker that has none yet, in its state folder: enrol.sh CLIENT ...
set -eu
for client in "$@"; do
  [ -e "/states/$client/enrolment" ] || fedssl token enrol "$client" --label compose --out "/states/$client/enrolment"
done
