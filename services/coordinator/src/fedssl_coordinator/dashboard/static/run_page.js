/* The tables of a run: the keys that also work on its page. */
import { $, keys } from "./layout.js";

keys.p = () => $("#pause")?.click();
for (const [key, rel] of [
  ["[", "prev"],
  ["]", "next"],
])
  keys[key] = () => $(`a[rel="${rel}"]`)?.click();
