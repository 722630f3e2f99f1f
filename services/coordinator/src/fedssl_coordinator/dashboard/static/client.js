/* One client: the bytes it sent per day. */
import { $ } from "./layout.js";
import { empties } from "./canvas.js";
import { chart } from "./charts.js";
import { bytes } from "./format.js";

empties();
const element = $("#bytes");
if (!element.dataset.empty) {
  const answer = await fetch(`/clients/${$("#client").dataset.clientId}/bytes.json`);
  if (answer.ok) {
    const found = await answer.json();
    const MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(" ");
    const day = (index) => {
      const [, month, date] = (found.days[index] ?? "").split("-");
      return month ? `${+date} ${MONTHS[month - 1]}` : "";
    };
    chart(element, {
      x: found.days.map((_, index) => index),
      height: 206,
      sync: null,
      y: [0, null],
      left: 62,
      right: 12,
      axis: day,
      title: day,
      value: bytes,
      tick: bytes,
      series: [{ label: "Sent", y: found.bytes, width: 1, stepped: true, color: "fill", fill: true }],
    });
  }
}
