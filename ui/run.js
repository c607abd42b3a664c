// A run: its graph, its stages, when each ran, its trainings, its results; beside them the stage that was chosen.

import { html, useEffect, useRef, useState } from "/vendor/preact.js";
import { ask } from "/api.js";
import { ago, bytes, figure, flat, named, seconds, t } from "/words.js";
import { Answer, Comparison, State, useAnswer, useChanges } from "/runs.js";
import { Charts } from "/charts.js";
import { Graph } from "/graph.js";
import { Drawings } from "/sweeps.js";
import { Lengths } from "/lengths.js";

const VIEWS = ["graph", "stages", "timeline", "training", "results"];
const TITLES = { graph: "Graph", stages: "Stages", timeline: "Timeline", training: "Training", results: "Results" };
const WITH_ROWS = new Set(["rows", "tokens", "packs", "samples"]);

export function Run({ run, view, stage }) {
  const [open, setOpen] = useState([]);
  const changes = useChanges({ run });
  const answer = useAnswer("run", { run, open }, changes);
  const last = useRef(null);
  if (answer.value) last.current = answer.value;
  if (!last.current) return html`<${Answer} of=${answer}>${() => ""}<//>`;
  const value = last.current;
  const at = (view, stage) => `#/run/${[run, view, stage].filter(Boolean).map(encodeURIComponent).join("/")}`;
  const choose = (stage) => { location.hash = at(view, stage); };
  const toggle = (sweep) => setOpen(open.includes(sweep) ? open.filter((one) => one !== sweep) : [...open, sweep]);
  const { run: summary, host } = value;
  const sweeps = [...new Set(value.stages.filter((one) => one.axes.length > 0).map((one) => one.declared))];
  return html`
    <p><a href="#/">${t("Back to all runs")}</a></p>
    <h1>${summary.pipeline} <${State} of=${summary.state} /></h1>
    <p class="quiet">${summary.run}, <span title=${summary.started}>${ago(summary.started)}</span>${summary.seconds !== null && `, ${seconds(summary.seconds)}`}
      ${host.name && html`, ${host.name}`}${host.processor && html`, ${host.processor}`}</p>
    ${value.failures.map((failure) => html`<section class="failure" role="alert"><h2><a href=${at(view, failure.stage)}>${failure.stage}</a>: ${t("failed")}</h2>
      <p>${failure.messages.join(": ")}</p>${failure.help && html`<p><b>${t("What to do")}:</b> ${failure.help}</p>`}</section>`)}
    <nav class="tabs">${VIEWS.map((name) => html`<a href=${at(name, stage)} aria-current=${name === view ? "page" : undefined}>${t(TITLES[name])}</a>`)}</nav>
    <div class=${stage ? "beside" : ""}>
      <section aria-live="polite">
        ${view === "graph" && html`
          ${sweeps.length > 0 && html`<p class="quiet">${sweeps.map((sweep) => html`<button type="button" onClick=${() => toggle(sweep)}>${t(open.includes(sweep) ? "Fold sweep" : "Open sweep")} ${sweep}</button> `)}</p>`}
          <${Graph} graph=${value.graph} stages=${value.stages} chosen=${stage} choose=${choose} open=${toggle} />`}
        ${view === "stages" && html`<${Stages} stages=${value.stages} at=${(id) => at(view, id)} />`}
        ${view === "timeline" && html`<${Timeline} value=${value} at=${(id) => at(view, id)} />`}
        ${view === "training" && html`<${Training} run=${run} stages=${value.stages} chosen=${stage} changes=${summary.state === "running" ? changes : 0} />`}
        ${view === "results" && html`<${Results} run=${run} value=${value} sweeps=${sweeps} />`}
      </section>
      ${stage && html`<${Stage} key=${stage} run=${run} stage=${stage} of=${value.stages.find((one) => one.stage === stage)} changes=${changes} close=${at(view)} at=${(id) => at(view, id)} />`}
    </div>`;
}

function Stages({ stages, at }) {
  return html`<div class="scroll" tabindex="0"><table>
    <thead><tr><th>${t("Stage")}</th><th>${t("Kind")}</th><th>${t("State")}</th><th class="number">${t("Took")}</th><th class="number">${t("Memory")}</th><th>${t("Why")}</th></tr></thead>
    <tbody>${stages.map((stage) => html`<tr key=${stage.stage}>
      <th scope="row"><a href=${at(stage.stage)}>${stage.stage}</a></th><td>${stage.kind}</td><td><${State} of=${stage.status} /></td>
      <td class="number">${seconds(stage.seconds)}</td><td class="number">${bytes(stage.peak_memory_bytes)}</td><td>${stage.why.join("; ")}</td></tr>`)}</tbody>
  </table></div>`;
}

/** When the process of each stage ran: a bar for each attempt. */
function Timeline({ value, at }) {
  const begun = Date.parse(value.run.started);
  const end = (attempt) => (attempt.seconds === null ? Date.now() : Date.parse(attempt.started) + 1000 * attempt.seconds);
  const ran = value.stages.filter((stage) => stage.attempts.some((attempt) => attempt.started));
  const attempts = ran.flatMap((stage) => stage.attempts).filter((attempt) => attempt.started);
  const length = Math.max(1, ...attempts.map((attempt) => end(attempt) - begun));
  const percent = (time) => `${((100 * time) / length).toFixed(3)}%`;
  if (ran.length === 0) return html`<p class="quiet">${t("nothing")}</p>`;
  return html`<ul class="timeline">${ran.map((stage) => html`<li key=${stage.stage}>
    <a href=${at(stage.stage)}>${stage.stage}</a>
    <span class="track">${stage.attempts.filter((attempt) => attempt.started).map((attempt) => html`<span
      class=${`bar ${attempt.failure ? "failed" : stage.status}`} title=${`${stage.stage} ${seconds((end(attempt) - Date.parse(attempt.started)) / 1000)}`}
      style=${{ left: percent(Date.parse(attempt.started) - begun), width: percent(end(attempt) - Date.parse(attempt.started)) }}></span>`)}</span>
    <span class="number">${seconds(stage.seconds)}</span></li>`)}</ul>`;
}

function Training({ run, stages, chosen, changes }) {
  const trains = stages.filter((stage) => stage.kind === "train" && stage.status !== "skipped" && stage.status !== "waiting");
  const only = trains.filter((stage) => stage.stage === chosen);
  const shown = only.length > 0 ? only : trains;
  return html`<${Charts} trainings=${shown.map((stage) => ({ run, stage: stage.stage, label: stage.stage }))} changes=${changes} />`;
}

function Results({ run, value, sweeps }) {
  const [made, tell] = useState({});
  const ended = value.stages.filter((stage) => (stage.status === "done" || stage.status === "cached") && /^(evaluate|generate|rank)$/.test(stage.kind));
  useEffect(() => {
    const stop = new AbortController();
    for (const { stage } of ended) {
      ask("stage", { run, stage }, stop.signal).then((story) => tell((before) => ({ ...before, [stage]: story.outputs })), () => {});
    }
    return () => stop.abort();
  }, [ended.map((stage) => stage.stage).join()]);
  return html`
    ${value.gates.length > 0 && html`<h2>${t("Gates")}</h2><ul>${value.gates.map((gate) => html`<li><b class=${gate.holds ? "good" : "bad"}>${gate.holds ? "✓" : "✗"} ${t(gate.holds ? "holds" : "does not hold")}</b> ${gate.gate}: ${gate.because}</li>`)}</ul>`}
    ${value.published.length > 0 && html`<h2>${t("Published")}</h2><ul>${value.published.map((copy) => html`<li>${copy.stage}.${copy.output}: <code>${copy.path}</code>${copy.failed && html` <b class="bad">✗ ${copy.failed.join(": ")}</b>`}</li>`)}</ul>`}
    ${sweeps.map((sweep) => html`<h2>${t("Sweep")} ${sweep}</h2><${Swept} run=${run} sweep=${sweep} />`)}
    <${Measured} made=${made} />
    ${ended.map(({ stage }) => html`<h2 key=${stage}>${stage}</h2>
      ${Object.entries(made[stage] || {}).map(([output, record]) => html`<${Output} run=${run} stage=${stage} output=${output} record=${record} shown=${record.kind === "samples"} />`)}`)}
    ${ended.length + value.gates.length + value.published.length + sweeps.length === 0 && html`<p class="quiet">${t("nothing")}</p>`}`;
}

/** The figures of all evaluations, a row for each. */
function Measured({ made }) {
  const rows = Object.entries(made).flatMap(([stage, outputs]) => Object.values(outputs)
    .filter((record) => record.kind === "metrics").map((record) => ({ stage, facts: record.facts })));
  const numbers = rows.flatMap(({ facts }) => Object.entries(facts).filter(([, value]) => typeof value === "number").map(([name]) => name));
  const names = [...new Set(numbers)];
  if (names.length === 0) return "";
  return html`<h2>${t("Figures")}</h2><div class="scroll" tabindex="0"><table>
    <thead><tr><th></th>${names.map((name) => html`<th class="number">${name}</th>`)}</tr></thead>
    <tbody>${rows.map(({ stage, facts }) => html`<tr><th scope="row">${stage}</th>${names.map((name) => html`<td class="number">${name in facts ? named(name, facts[name]) : ""}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

function Swept({ run, sweep }) {
  return html`<${Answer} of=${useAnswer("compare", { run, sweep })}>${(value) => html`<${Comparison} of=${value} /><${Drawings} of=${value} />`}<//>`;
}

/** All about one stage. */
function Stage({ run, stage, of, changes, close, at }) {
  const heading = useRef(null);
  const answer = useAnswer("stage", { run, stage }, of ? of.status : changes);
  useEffect(() => heading.current && heading.current.focus({ preventScroll: true }), []);
  return html`<aside aria-label=${stage}>
    <a class="close" href=${close} aria-label=${t("Close")}>✕</a>
    <h2 tabindex="-1" ref=${heading}>${stage} ${of && html`<${State} of=${of.status} />`}</h2>
    <${Answer} of=${answer}>${(story) => html`
      <p class="quiet">${[story.kind, seconds(story.seconds), bytes(story.peak_memory_bytes)].filter(Boolean).join(", ")}</p>
      ${story.attempts.filter((attempt) => attempt.failure).map((attempt) => html`<section class="failure"><p>${attempt.failure.messages.join(": ")}</p>
        ${attempt.failure.help && html`<p><b>${t("What to do")}:</b> ${attempt.failure.help}</p>`}</section>`)}
      ${story.warnings.length > 0 && html`<h3>${t("Warnings")}</h3><ul>${story.warnings.map((text) => html`<li>${text}</li>`)}</ul>`}
      ${story.reports.length > 0 && html`<h3>${t("Reports")}</h3>${story.reports.map((text) => html`<p class="document">${text}</p>`)}`}
      ${story.why.length > 0 && html`<h3>${t("Why")}</h3><ul>${story.why.map((text) => html`<li>${text}</li>`)}</ul>`}
      ${story.inputs.length > 0 && html`<h3>${t("Inputs")}</h3><ul>${story.inputs.map((input) => html`<li><a href=${at(input.stage)}>${input.stage}.${input.output}</a> (${input.kind})</li>`)}</ul>`}
      ${story.outputs && html`<h3>${t("Outputs")}</h3>${Object.entries(story.outputs).map(([output, record]) => html`<${Output} run=${run} stage=${stage} output=${output} record=${record} />`)}`}
      <h3>${t("Parameters")}</h3><dl>${flat(story.parameters).map(([name, value]) => html`<dt>${name}</dt><dd>${figure(value)}</dd>`)}</dl>
      ${story.key && html`<h3>${t("Key")}</h3><p class="code wrap">${story.key}</p>`}
    `}<//>
    <${Log} run=${run} stage=${stage} changes=${of && of.status === "started" ? changes : 0} />
  </aside>`;
}

function Log({ run, stage, changes }) {
  const answer = useAnswer("log", { run, stage }, changes);
  const last = useRef("");
  const box = useRef(null);
  if (answer.value) last.current = answer.value.text;
  useEffect(() => { if (box.current) box.current.scrollTop = box.current.scrollHeight; }, [last.current]);
  if (!last.current) return "";
  return html`<h3>${t("Log")}</h3><pre class="log" ref=${box} tabindex="0">${last.current}</pre>`;
}

/** An output: its figures, and its rows or steps once they are asked for. */
function Output({ run, stage, output, record, shown }) {
  const [open, setOpen] = useState(Boolean(shown));
  const [rows, more] = useState(10);
  const answer = useAnswer(open ? "output" : null, { run, stage, output, rows });
  const facts = flat(record.facts).filter(([, value]) => value !== null && !Array.isArray(value));
  return html`<details class="output" open=${open} onToggle=${(event) => setOpen(event.target.open)}>
    <summary>${output} <span class="quiet">${record.kind}</span></summary>
    ${record.kind !== "metrics" && facts.length > 0 && html`<dl>${facts.map(([name, value]) => html`<dt>${name}</dt><dd>${named(name, value)}</dd>`)}</dl>`}
    ${open && (record.kind === "tokens" || record.kind === "packs") && html`<${Lengths} run=${run} stage=${stage} output=${output} />`}
    ${open && html`<${Answer} of=${answer}>${(value) => html`
      ${value.metrics && html`<dl>${flat(value.metrics).filter(([, one]) => one !== null).map(([name, one]) => html`<dt>${name}</dt><dd>${named(name, one)}</dd>`)}</dl>`}
      ${value.rows && html`<ol class="data">${value.rows.map((row) => html`<li><${Row} of=${row} /></li>`)}</ol>
        ${WITH_ROWS.has(record.kind) && value.rows.length === rows && html`<button type="button" onClick=${() => more(rows * 2)}>${t("Show rows")} +${rows}</button>`}`}
      ${!value.rows && !value.metrics && html`<ul>${value.files.map((file) => html`<li><code>${file.path}</code> ${bytes(file.size)}</li>`)}</ul>`}
    `}<//>`}
  </details>`;
}

/** A row: columns as text, or documents with the tokens that are trained marked, by an underline and not by colour alone. */
function Row({ of }) {
  if (of.kind === "text") {
    const pair = of.fields.some((field) => field.name.startsWith("chosen")) && of.fields.some((field) => field.name.startsWith("rejected"));
    return html`<div class=${pair ? "pair" : ""}>${of.fields.map((field) => html`<div class="field"><b>${field.name}</b><p>${field.text}</p></div>`)}</div>`;
  }
  return html`${of.documents.map((document) => html`<p class="document" title=${`${document.tokens} ${t("Tokens")}, ${document.trained} ${t("trained")}`}>
    ${document.role && html`<b>${document.role}</b> `}${document.segments.map((segment) => (segment.trained
      ? html`<mark title=${`${segment.tokens} ${t("Tokens")}, ${t("trained")}`}>${segment.text}</mark>` : html`<span>${segment.text}</span>`))}</p>`)}
    ${of.padding > 0 && html`<p class="quiet">${of.padding} ${t("padding")}</p>`}`;
}
