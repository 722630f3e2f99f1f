/* Chromium under a POSIX locale calls its language "en-US@posix", which Intl refuses, and with it uPlot. */
try {
  Intl.getCanonicalLocales(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
