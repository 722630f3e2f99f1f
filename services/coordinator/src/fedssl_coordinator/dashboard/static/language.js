/* Under a POSIX locale Chromium reports the language "en-US@posix", which Intl, and therefore uPlot, rejects. */
try {
  Intl.getCanonicalLocales(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
