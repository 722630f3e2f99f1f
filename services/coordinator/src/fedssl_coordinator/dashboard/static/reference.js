/* Open the operation or object that the address links to. */
import { $ } from "./layout.js";

const open = () => {
  const found = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (found && $("details", found)) {
    $("details", found).open = true;
    found.scrollIntoView();
  }
};
addEventListener("hashchange", open);
open();
