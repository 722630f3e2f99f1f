/* The tables of a run: steer it from here too. */
import { $, keys } from "./shell.js";

keys.p = () => $("#pause")?.click();
for (const [key, rel] of [
  ["[", "prev"],
  ["]", "next"],
])
  keys[key] = () => $(`a[rel="${rel}"]`)?.click();
