// Unpacks the Chromium that the npm package @sparticuz/chromium ships, together with its libraries. Needs no root rights.
import { createReadStream, createWriteStream, mkdirSync } from "node:fs";
import { chmod } from "node:fs/promises";
import { execFileSync } from "node:child_process";
import { pipeline } from "node:stream/promises";
import { createBrotliDecompress } from "node:zlib";

const [bin, out] = process.argv.slice(2);
mkdirSync(out, { recursive: true });
const unpack = (name, to) => pipeline(createReadStream(`${bin}/${name}.br`), createBrotliDecompress(), createWriteStream(`${out}/${to}`));
await unpack("chromium", "chromium");
await chmod(`${out}/chromium`, 0o755);
for (const name of ["al2023.tar", "swiftshader.tar", "fonts.tar"]) {
  await unpack(name, name);
  execFileSync("tar", ["-xf", `${out}/${name}`, "-C", out]);
}
