/* One client: the bytes it sent per day. */
import { $ } from "./layout.js";
import { load, showLoaded } from "./canvas.js";
import { chart } from "./charts.js";
import { bytes } from "./format.js";

const element = $("#bytes");
showLoaded([element], async () => {
  if (!element.dataset.empty) {
    const found = await load(`/clients/${$("#client").dataset.clientId}/bytes.json`);
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
});
