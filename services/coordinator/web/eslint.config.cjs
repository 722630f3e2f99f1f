/* Rules for the scripts that the web page loads. CommonJS, so that NODE_PATH can point to the installed packages. */
const js = require("@eslint/js");
const globals = require("globals");

module.exports = [
  js.configs.recommended,
  {
    languageOptions: { globals: { ...globals.browser, uPlot: "readonly", htmx: "readonly" } },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "array-callback-return": "error",
      eqeqeq: ["error", "smart"],
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-shadow": "error",
      "no-var": "error",
      "one-var": ["error", "never"],
      "object-shorthand": "error",
      "prefer-const": "error",
    },
  },
  { files: ["**/theme.js", "**/language.js"], languageOptions: { sourceType: "script" } },
];
