#!/usr/bin/env bash
# Download the vendored files of the web page again, and compare them with the committed ones.
set -euo pipefail
vendor="$(dirname "$0")/../src/fedssl_coordinator/dashboard/static/vendor"
fetched="$(mktemp -d)"
trap 'rm -rf "$fetched"' EXIT
npm install --silent --no-audit --no-fund --no-save --ignore-scripts --prefix "$fetched" \
  htmx.org@2.0.11 uplot@1.6.32 @fontsource-variable/inter@5.3.0
cd "$vendor"
for file in *.js *.css *.woff2; do
  cmp "$file" "$(find "$fetched/node_modules" -name "$file" -path '*/dist/*' -o -name "$file" -path '*/files/*' | head -1)"
done
sha256sum --quiet --check <(sed '1,/^sha256$/d' VENDORED.txt)
echo "static/vendor matches VENDORED.txt"
