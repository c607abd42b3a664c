// Sweeps as drawings: parallel coordinates, one figure over a parameter, and what more devices brought.

import { html, useState } from "/vendor/preact.js";
import { figure, named, t } from "/words.js";

const WIDTH = 900;
const HEIGHT = 320;
const MARGIN = { left: 70, right: 90, top: 46, bottom: 44 };
const SCALED = ["resources.count", "resources.nodes", "resources.threads"];

/** The values of a parameter or a figure over candidates: along numbers where all of them are, else one place for each word. */
function axis(candidates, group, name) {
  const texts = candidates.map((candidate) => candidate[group][name]);
  const known = texts.filter((text) => text !== undefined && text !== null && text !== "");
  const numbers = known.map(Number);
  if (known.length > 0 && numbers.every(Number.isFinite)) {
    const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
    // Rates and ranks are chosen by factors.
    const wide = low > 0 && high / low >= 20;
    const scale = (value) => (wide ? Math.log(value) : value);
    const at = (text) => (text === undefined || text === null || text === "" ? null
      : high === low ? 0.5 : (scale(Number(text)) - scale(low)) / (scale(high) - scale(low)));
    return { group, name, at, ends: [low, high].map((value) => (group === "metrics" ? named(name, value) : figure(value))) };
  }
  const words = [...new Set(known)].sort();
  const at = (text) => (known.includes(text) ? (words.length === 1 ? 0.5 : words.indexOf(text) / (words.length - 1)) : null);
  return { group, name, at, words };
}

const label = (candidate) => `${candidate.name}${candidate.best.length > 0 ? ` ★ ${candidate.best.join(", ")}` : ""}`;

/** A line for each candidate through all that differs and came out; the best of the chosen figure stand out, thick and in front. */
function Parallel({ of, chosen }) {
  const parameters = of.parameters.map((name) => axis(of.candidates, "parameters", name));
  const metrics = of.metrics.filter((name) => of.candidates.some((candidate) => candidate.metrics[name] !== undefined)).slice(0, 6).map((name) => axis(of.candidates, "metrics", name));
  const axes = [...parameters, ...metrics].slice(0, 10);
  if (axes.length < 2) return "";
  const x = (place) => MARGIN.left + ((WIDTH - MARGIN.left - MARGIN.right) * place) / (axes.length - 1);
  const y = (share) => HEIGHT - MARGIN.bottom - share * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const line = (candidate) => axes.map(({ group, name, at }, place) => ({ place, share: at(candidate[group][name]) })).filter(({ share }) => share !== null)
    .map(({ place, share }, point) => `${point === 0 ? "M" : "L"}${x(place).toFixed(1)} ${y(share).toFixed(1)}`).join("");
  const sorted = [...of.candidates].sort((one, other) => Number(one.best.includes(chosen)) - Number(other.best.includes(chosen)));
  return html`<div class="scroll" tabindex="0"><svg class="drawing" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${t("Parallel coordinates")}: ${axes.map(({ name }) => name).join(", ")}`}>
    ${sorted.map((candidate) => html`<path class=${`line ${candidate.best.includes(chosen) ? "best" : ""}`} d=${line(candidate)}><title>${label(candidate)}</title></path>`)}
    ${axes.map(({ name, ends, words }, place) => html`<g>
      <line class="axis" x1=${x(place)} x2=${x(place)} y1=${y(0)} y2=${y(1)} />
      <text class="name" x=${x(place)} y=${place % 2 ? 14 : 26} text-anchor="middle">${name}</text>
      ${ends && html`<text x=${x(place) + 4} y=${y(1) - 2}>${ends[1]}</text><text x=${x(place) + 4} y=${y(0) + 14}>${ends[0]}</text>`}
      ${words && words.slice(0, 12).map((word) => html`<text x=${x(place) + 5} y=${y(words.length === 1 ? 0.5 : words.indexOf(word) / (words.length - 1)) - 3}>${word.length > 24 ? `${word.slice(0, 23)}…` : word}</text>`)}
    </g>`)}
  </svg></div>`;
}

/** One figure over one parameter. */
function Scatter({ of, parameter, metric }) {
  const across = axis(of.candidates, "parameters", parameter);
  const up = axis(of.candidates, "metrics", metric);
  const points = of.candidates.map((candidate) => ({ candidate, x: across.at(candidate.parameters[parameter]), y: up.at(candidate.metrics[metric]) }))
    .filter(({ x, y }) => x !== null && y !== null);
  if (points.length === 0) return html`<p class="quiet">${t("nothing")}</p>`;
  const left = (share) => MARGIN.left + share * (WIDTH - MARGIN.left - MARGIN.right);
  const top = (share) => HEIGHT - MARGIN.bottom - share * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const ticks = across.words ? across.words.map((word, at) => [word, across.words.length === 1 ? 0.5 : at / (across.words.length - 1)]) : [[across.ends[0], across.at(Math.min(...of.candidates.map((one) => Number(one.parameters[parameter])).filter(Number.isFinite)))], [across.ends[1], 1]];
  return html`<div class="scroll" tabindex="0"><svg class="drawing" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${metric} ${t("over")} ${parameter}`}>
    <line class="axis" x1=${left(0)} x2=${left(1)} y1=${top(0) + 8} y2=${top(0) + 8} /><line class="axis" x1=${left(0) - 8} x2=${left(0) - 8} y1=${top(0)} y2=${top(1)} />
    ${ticks.map(([text, share]) => html`<text x=${left(share)} y=${top(0) + 24} text-anchor="middle">${text}</text>`)}
    <text class="name" x=${left(0.5)} y=${HEIGHT - 4} text-anchor="middle">${parameter}</text>
    ${up.ends && html`<text x=${left(0) - 12} y=${top(0)} text-anchor="end">${up.ends[0]}</text><text x=${left(0) - 12} y=${top(1) + 8} text-anchor="end">${up.ends[1]}</text>`}
    <text class="name" x="4" y="14">${metric}</text>
    ${points.map(({ candidate, x, y }) => (candidate.best.includes(metric)
      ? html`<text class="star" x=${left(x)} y=${top(y) + 6} text-anchor="middle">★<title>${label(candidate)}</title></text>`
      : html`<circle cx=${left(x)} cy=${top(y)} r="5"><title>${label(candidate)}</title></circle>`))}
  </svg></div>`;
}

/** Speed-up over what was used, with the line that nothing can be above, and how much of it was had. */
function Scaling({ of, over }) {
  const others = of.parameters.filter((name) => name !== over);
  const families = new Map();
  for (const { parameters, metrics } of of.candidates) {
    const used = Number(parameters[over]);
    if (!(used > 0) || metrics.speed_up === undefined || metrics.speed_up === null) continue;
    const name = others.map((other) => `${other}=${parameters[other]}`).join(" ");
    families.set(name, [...(families.get(name) || []), { used, speedUp: metrics.speed_up, efficiency: metrics.efficiency }]);
  }
  const all = [...families.values()].flat();
  if (all.length === 0) return "";
  const [fewest, most] = [Math.min(...all.map(({ used }) => used)), Math.max(...all.map(({ used }) => used))];
  const high = Math.max(most / fewest, ...all.map(({ speedUp }) => speedUp));
  const left = (used) => MARGIN.left + ((used - fewest) / (most - fewest || 1)) * (WIDTH - MARGIN.left - MARGIN.right);
  const top = (speedUp) => HEIGHT - MARGIN.bottom - (speedUp / high) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const path = (points) => points.map(({ used, speedUp }, at) => `${at === 0 ? "M" : "L"}${left(used).toFixed(1)} ${top(speedUp).toFixed(1)}`).join("");
  const steps = [...new Set(all.map(({ used }) => used))].sort((one, other) => one - other);
  return html`<h3>${t("Speed-up and efficiency")}</h3><div class="scroll" tabindex="0"><svg class="drawing" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${t("Speed-up and efficiency")} ${t("over")} ${over}`}>
    <path class="ideal" d=${path([{ used: fewest, speedUp: 1 }, { used: most, speedUp: most / fewest }])}><title>${t("linear")}</title></path>
    ${[...families].map(([name, points]) => {
      const sorted = [...points].sort((one, other) => one.used - other.used);
      return html`<path class="line best" d=${path(sorted)}><title>${name}</title></path>
        ${sorted.map(({ used, speedUp, efficiency }) => html`<circle cx=${left(used)} cy=${top(speedUp)} r="5"><title>${name} ${used}: ${figure(speedUp)}×, ${Math.round(100 * efficiency)} %</title></circle>
          <text x=${left(used) + 8} y=${top(speedUp) + 16}>${figure(Number(speedUp.toPrecision(3)))}×, ${Math.round(100 * efficiency)} %</text>`)}`;
    })}
    ${steps.map((used) => html`<text x=${left(used)} y=${HEIGHT - 22} text-anchor="middle">${used}</text>`)}
    <text class="name" x=${WIDTH / 2} y=${HEIGHT - 4} text-anchor="middle">${over}</text><text class="name" x="4" y="14">${t("Speed-up and efficiency")}</text>
  </svg></div>`;
}

function Choice({ text, of, value, choose }) {
  return html`<label>${text} <select value=${value} onChange=${(event) => choose(event.target.value)}>${of.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>`;
}

/** The drawings of a sweep; the table beside them says the same in numbers. */
export function Drawings({ of }) {
  const told = of.metrics.filter((name) => of.candidates.filter((candidate) => typeof candidate.metrics[name] === "number").length > 1);
  const [metric, measure] = useState(null);
  const [parameter, spread] = useState(null);
  if (of.candidates.length < 2 || of.parameters.length === 0 || told.length === 0) return "";
  const up = told.includes(metric) ? metric : told[0];
  const across = of.parameters.includes(parameter) ? parameter : of.parameters[0];
  const over = SCALED.find((name) => of.parameters.includes(name));
  return html`
    ${over && html`<${Scaling} of=${of} over=${over} />`}
    <form class="bar" onSubmit=${(event) => event.preventDefault()}>
      <${Choice} text=${t("Figure")} of=${told} value=${up} choose=${measure} /> <${Choice} text=${t("over")} of=${of.parameters} value=${across} choose=${spread} />
    </form>
    <${Scatter} of=${of} parameter=${across} metric=${up} />
    <h3>${t("Parallel coordinates")}</h3><${Parallel} of=${of} chosen=${up} />`;
}
