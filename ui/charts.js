// Curves of trainings: one chart a figure, drawn once it is seen, several trainings over one another.

import { html, useEffect, useMemo, useRef, useState } from "/vendor/preact.js";
import { ask } from "/api.js";
import { figure as inWords, t } from "/words.js";

// Told apart by people with any kind of sight, on light and on dark (Okabe and Ito); further lines are dashed.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DASHES = [[], [7, 4], [2, 3]];
const TO_COME = [3, 4];
const FIRST = ["loss", "grad_norm", "learning_rate", "tokens_per_second", "peak_memory_bytes"];
const HIDDEN = new Set(["epoch", "rows", "tokens", "target_tokens", "padded_tokens_per_second", "trained_tokens_per_second"]);
const HEIGHT = 260;

function colour(at, faint) {
  return COLOURS[at % COLOURS.length] + (faint ? "55" : "");
}

/** The values of a curve along what was chosen. */
function across(curve, axis) {
  if (axis === "Tokens" && curve.tokens) return curve.tokens;
  if (axis === "Time") return curve.seconds;
  return curve.steps;
}

/** Whether a part of the page has been seen yet. */
function useSeen(box) {
  const [seen, see] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        see(true);
        observer.disconnect();
      }
    }, { rootMargin: "200px" });
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  return seen;
}

function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

function Chart({ trainings, kind, figure, axis, smooth, changes }) {
  const place = useRef(null);
  const drawn = useRef(null);
  const seen = useSeen(place);
  const [curves, tell] = useState(null);
  const [range, zoom] = useState(null);
  const [failure, fail] = useState(null);
  const title = kind === "train" ? figure : `${kind} ${figure}`;
  useEffect(() => {
    if (!seen) return undefined;
    const stop = new AbortController();
    const query = { kind, figure, smooth: smooth > 0 ? smooth : undefined, ...(range || {}) };
    const wanted = trainings.map((training) => ask("curve", { run: training.run, stage: training.stage, ...query }, stop.signal));
    Promise.all(wanted).then(tell, (error) => stop.signal.aborted || fail(error));
    return () => stop.abort();
  }, [seen, JSON.stringify(trainings), kind, figure, smooth, JSON.stringify(range), changes]);
  const tables = useMemo(() => {
    if (!curves) return null;
    const lines = [];
    curves.forEach((curve, at) => {
      const along = across(curve, axis);
      const told = along.map((_, point) => point).filter((point) => along[point] !== null);
      const line = (values, faint, name) => lines.push({ at, faint, name, x: told.map((point) => along[point]), y: told.map((point) => values[point]) });
      line(curve.values, Boolean(curve.smooth), trainings[at].label);
      if (curve.planned && axis === "Step") {
        lines.push({ at, planned: true, name: `${trainings[at].label}, ${t("to come")}`, x: curve.planned.steps, y: curve.planned.values });
      }
      if (curve.smooth) line(curve.smooth, false, `${trainings[at].label}, ${t("Smoothing")} ${smooth}`);
    });
    return lines.filter((line) => line.x.length > 0);
  }, [curves, axis]);
  useEffect(() => {
    if (!tables || tables.length === 0) return undefined;
    const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
    const faint = getComputedStyle(document.documentElement).getPropertyValue("--line").trim();
    const axes = { stroke: ink, grid: { stroke: faint, width: 1 }, ticks: { stroke: faint } };
    const data = uPlot.join(tables.map((line) => [line.x, line.y]));
    const series = tables.map((line) => ({
      label: line.name,
      stroke: colour(line.at, line.faint),
      width: line.faint ? 1 : 1.6,
      dash: line.planned ? TO_COME : DASHES[Math.floor(line.at / COLOURS.length) % DASHES.length],
      spanGaps: true,
      points: { show: line.x.length < 3 },
      value: (_, value) => (value === null ? "–" : inWords(value)),
    }));
    const zoomed = (plot) => {
      const { left, width } = plot.select;
      if (width < 4 || axis !== "Step") return;
      zoom({ from: Math.floor(plot.posToVal(left, "x")), to: Math.ceil(plot.posToVal(left + width, "x")) });
    };
    const options = {
      width: place.current.clientWidth, height: HEIGHT, scales: { x: { time: false } }, legend: { live: true },
      series: [{ label: t(axis), value: (_, value) => (value === null ? "–" : inWords(value)) }, ...series],
      axes: [axes, { ...axes, size: 64, values: (_, ticks) => ticks.map((tick) => (tick >= 1e6 ? tick.toExponential(1) : inWords(tick))) }],
      hooks: { setSelect: [zoomed] }, cursor: { drag: { x: true, y: false } },
    };
    const plot = new uPlot(options, data, place.current);
    drawn.current = plot;
    const fit = new ResizeObserver(() => plot.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    fit.observe(place.current);
    return () => {
      fit.disconnect();
      plot.destroy();
    };
  }, [tables]);
  const picture = () => drawn.current && drawn.current.ctx.canvas.toBlob((blob) => save(`${title}.png`, blob));
  const spreadsheet = () => {
    const lines = curves.flatMap((curve, at) => curve.steps.map((step, point) =>
      [trainings[at].run, trainings[at].stage, step, curve.tokens ? curve.tokens[point] : "", curve.seconds[point] ?? "", curve.values[point] ?? ""].map((cell) => quoted(String(cell))).join(",")));
    save(`${title}.csv`, new Blob([`run,stage,step,tokens,seconds,${quoted(title)}\n${lines.join("\n")}\n`], { type: "text/csv" }));
  };
  const empty = tables && tables.length === 0;
  return html`
    <figure class="chart" hidden=${empty}>
      <figcaption>${title}
        <span class="tools">
          ${range && html`<button type="button" onClick=${() => zoom(null)}>${t("Reset zoom")}</button>`}
          <button type="button" onClick=${picture} disabled=${!curves}>${t("Save picture")}</button>
          <button type="button" onClick=${spreadsheet} disabled=${!curves}>${t("Save table")}</button>
        </span>
      </figcaption>
      ${failure && html`<p role="alert" class="failure">${failure.message}</p>`}
      <div ref=${place} class="plot" role="img" aria-label=${spoken(title, tables)}></div>
    </figure>`;
}

/** What a chart shows, for who does not see it. */
function spoken(title, tables) {
  if (!tables) return title;
  const lines = tables.filter((line) => !line.faint && !line.planned).map((line) => {
    const last = line.y.filter((value) => value !== null).pop();
    return `${line.name}: ${line.x.length}, ${last === undefined ? "–" : inWords(last)}`;
  });
  return `${title}. ${lines.join("; ")}`;
}

/** All figures that some of the trainings tell; `changes` counts up while they go on. */
export function Charts({ trainings, changes = 0 }) {
  const [axis, along] = useState("Step");
  const [smooth, setSmooth] = useState(0);
  const [kinds, tell] = useState(null);
  useEffect(() => {
    const stop = new AbortController();
    const asked = trainings.map(({ run, stage }) => ask("figures", { run, stage }, stop.signal).catch(() => []));
    Promise.all(asked).then((lists) => {
      if (stop.signal.aborted) return;
      const found = new Map();
      for (const { kind, figures } of lists.flat()) {
        for (const figure of figures) {
          if (!HIDDEN.has(figure)) found.set(`${kind} ${figure}`, { kind, figure });
        }
      }
      const rank = ({ kind, figure }) => (FIRST.indexOf(figure) + 1 || 99) * 2 + (kind === "train" ? 0 : 1);
      tell([...found.values()].sort((one, other) => rank(one) - rank(other)));
    });
    return () => stop.abort();
  }, [JSON.stringify(trainings), changes > 0 && kinds && kinds.length < 3 ? changes : 0]);
  if (trainings.length === 0) return html`<p class="quiet">${t("No training in this run")}</p>`;
  if (!kinds) return html`<p class="quiet">${t("Loading")} …</p>`;
  if (kinds.length === 0) return html`<p class="quiet">${t("The stage has logged no steps")}</p>`;
  return html`
    <form class="bar" onSubmit=${(event) => event.preventDefault()}>
      <label>${t("Across")} <select value=${axis} onChange=${(event) => along(event.target.value)}>
        ${["Step", "Tokens", "Time"].map((name) => html`<option value=${name}>${t(name)}</option>`)}
      </select></label>
      <label>${t("Smoothing")} <input type="range" min="0" max="0.99" step="0.01" value=${smooth} onChange=${(event) => setSmooth(Number(event.target.value))} /> <output>${smooth}</output></label>
    </form>
    <div class="charts">${kinds.map(({ kind, figure }) => html`
      <${Chart} key=${`${kind} ${figure}`} trainings=${trainings} kind=${kind} figure=${figure} axis=${axis} smooth=${smooth} changes=${changes} />`)}</div>`;
}
