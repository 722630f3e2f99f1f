/* Format numbers in the same way as formats.py. */
export const number = (value, places = 0) =>
  value == null
    ? "–"
    : value
        .toLocaleString("en-GB", { minimumFractionDigits: places, maximumFractionDigits: places })
        .replace("-", "\u2212");
export const short = (value) => {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= 100 && size < 1e9) return number(value);
  const digits = value !== 0 && (size < 0.001 || size >= 1e9) ? value.toExponential(1) : String(+value.toPrecision(3));
  return digits.replaceAll("-", "\u2212");
};
export const percent = (value, places = 1) => (value == null ? "–" : `${number(100 * value, places)}%`);
export const bytes = (value) => {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 999.5 && unit < 5) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toPrecision(3)} ${units[unit]}`;
};
export const seconds = (value) => {
  if (value < 9.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  const minutes = Math.round(value / 60); /* rounded first, to avoid "1 min 60 s" */
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
};
export const clock = (at, exact = true) => new Date(at * 1000).toISOString().slice(11, exact ? 19 : 16);
