// How long documents are, and what was cut and left out to make them so.

import { html } from "/vendor/preact.js";
import { Answer, useAnswer } from "/runs.js";
import { figure, t } from "/words.js";

const WIDTH = 560;
const HEIGHT = 150;
const FLOOR = HEIGHT - 20;

export function Lengths({ run, stage, output }) {
  return html`<${Answer} of=${useAnswer("lengths", { run, stage, output })}>${(value) => html`<${Histogram} of=${value} />`}<//>`;
}

function Histogram({ of }) {
  const most = Math.max(1, ...of.documents);
  const step = (WIDTH - 10) / of.documents.length;
  const range = (bar) => `${figure(bar * of.width + 1)}–${figure((bar + 1) * of.width)}`;
  const last = of.documents.length * of.width;
  const lost = [
    of.truncated > 0 && `${figure(of.truncated)} ${t("cut to")} ${figure(of.max_seq_len)}`,
    of.dropped > 0 && `${figure(of.dropped)} ${t("left out")}`,
    of.fully_masked > 0 && `${figure(of.fully_masked)} ${t("without a token to train on")}`,
  ].filter(Boolean);
  const cut = of.max_seq_len && of.max_seq_len <= last ? 5 + (of.max_seq_len / of.width) * step : null;
  const told = of.documents.map((count, bar) => [bar, count]).filter(([, count]) => count > 0);
  return html`<figure class="lengths">
    <figcaption>${t("Lengths")} <span class="quiet">${t("Tokens")}${of.rows < of.of && `, ${t("of the first rows")}: ${figure(of.rows)} / ${figure(of.of)}`}</span></figcaption>
    <svg class="drawing narrow" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${t("Lengths")}: ${told.map(([bar, count]) => `${range(bar)}: ${count}`).join("; ")}`}>
      ${told.map(([bar, count]) => html`<rect class="bars" x=${5 + bar * step} width=${Math.max(1, step - 1)} y=${FLOOR - (count / most) * (FLOOR - 14)} height=${(count / most) * (FLOOR - 14)}>
        <title>${range(bar)}: ${figure(count)} ${t("Documents")}</title></rect>`)}
      <line class="axis" x1="5" x2=${WIDTH - 5} y1=${FLOOR} y2=${FLOOR} />
      ${cut && html`<line class="cut" x1=${cut} x2=${cut} y1="4" y2=${FLOOR}><title>max_seq_len ${of.max_seq_len}</title></line>`}
      <text x="5" y=${HEIGHT - 4}>1</text><text x=${WIDTH - 5} y=${HEIGHT - 4} text-anchor="end">${figure(last)}</text><text x="5" y="11">${figure(most)}</text>
    </svg>
    ${lost.length > 0 && html`<p class="bad">✂ ${lost.join(", ")}</p>`}
  </figure>`;
}
