// All runs in a table that draws only the rows that are seen, and chosen runs side by side.

import { html, useEffect, useMemo, useRef, useState } from "/vendor/preact.js";
import { ask, watch } from "/api.js";
import { ago, named, seconds, short, t } from "/words.js";
import { Charts } from "/charts.js";

const ROW = 38;
const AROUND = 8;
const MARKS = { running: "▶", succeeded: "✓", failed: "✗", interrupted: "■", cut_off: "⚠", done: "✓", cached: "↺", skipped: "–", started: "▶", waiting: "…" };

/** A state: by a sign and a word, not by a colour alone. */
export function State({ of }) {
  return html`<span class=${`state ${of}`}><span aria-hidden="true">${MARKS[of] || "?"}</span> ${t(of)}</span>`;
}

/** What was asked for, a failure, or that it is on its way. */
export function Answer({ of, children }) {
  if (of.failure) return html`<p role="alert" class="failure">${of.failure.message}${of.failure.help && html`<br />${of.failure.help}`}</p>`;
  if (!of.value) return html`<p class="quiet">${t("Loading")} …</p>`;
  return children(of.value);
}

/** Asks again whenever `what` or the count of changes differs; keeps what it has meanwhile. */
export function useAnswer(path, query, changes = 0) {
  const [answer, tell] = useState({});
  const what = path && JSON.stringify([path, query]);
  useEffect(() => {
    if (!path) return undefined;
    const stop = new AbortController();
    ask(path, query, stop.signal).then(
      (value) => tell({ what, value }),
      (failure) => stop.signal.aborted || tell({ what, failure }),
    );
    return () => stop.abort();
  }, [what, changes]);
  return answer.what === what ? answer : {};
}

/** How often something has changed since the view was opened. */
export function useChanges(query, every) {
  const [count, set] = useState(0);
  useEffect(() => watch(query, () => set((before) => before + 1)), [JSON.stringify(query)]);
  useEffect(() => {
    if (!every) return undefined;
    const timer = setInterval(() => set((before) => before + 1), every);
    return () => clearInterval(timer);
  }, [every]);
  return count;
}

// The figures of a run never change once it has ended.
const figuresOf = new Map();

function Figures({ run }) {
  const ended = run.state !== "running";
  const known = figuresOf.get(run.run);
  const answer = useAnswer(known ? null : "compare", { run: run.run });
  const value = known || answer.value;
  if (value && ended) figuresOf.set(run.run, value);
  if (!value) return "";
  const told = Object.entries(value.candidates[0].metrics).filter(([name]) => !/seconds$|_bytes$|per_second$/.test(name));
  return told.slice(0, 3).map(([name, figure]) => html`<span class="figure"><i>${name}</i> ${named(name, figure)}</span>`);
}

function counts(of) {
  return ["done", "cached", "failed", "skipped"].filter((state) => of[state]).map((state) => `${of[state]} ${t(state)}`).join(", ");
}

export function Runs() {
  const [busy, setBusy] = useState(false);
  const changes = useChanges({}, busy ? 2000 : 0);
  const answer = useAnswer("runs", {}, changes);
  const [words, setWords] = useState("");
  const [state, setState] = useState("");
  const [chosen, choose] = useState([]);
  const [top, setTop] = useState(0);
  const box = useRef(null);
  const last = useRef(null);
  if (answer.value) last.current = answer.value;
  const all = (last.current && last.current.runs) || [];
  useEffect(() => setBusy(all.some((run) => run.state === "running")), [all]);
  const runs = useMemo(() => {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    return all.filter((run) => {
      const text = `${run.run} ${run.pipeline} ${run.file}`.toLowerCase();
      return (!state || run.state === state) && wanted.every((word) => text.includes(word));
    });
  }, [all, words, state]);
  if (!last.current) return html`<${Answer} of=${answer}>${() => ""}<//>`;
  const height = box.current ? box.current.clientHeight : 600;
  const from = Math.max(0, Math.floor(top / ROW) - AROUND);
  const to = Math.min(runs.length, Math.ceil((top + height) / ROW) + AROUND);
  const toggle = (run) => choose(chosen.includes(run) ? chosen.filter((one) => one !== run) : [...chosen, run]);
  const row = (run, at) => html`
    <tr key=${run.run} aria-rowindex=${at + 2}>
      <td><input type="checkbox" aria-label=${`${t("Compare")} ${run.run}`} checked=${chosen.includes(run.run)} onChange=${() => toggle(run.run)} /></td>
      <td><${State} of=${run.state} /></td>
      <td><a href=${`#/run/${encodeURIComponent(run.run)}`}>${run.pipeline}</a></td>
      <td class="code">${short(run.run)}</td>
      <td title=${run.started}>${ago(run.started)}</td>
      <td class="number">${seconds(run.seconds)}</td>
      <td>${counts(run.counts)}</td>
      <td><${Figures} run=${run} /></td>
    </tr>`;
  const states = [...new Set(all.map((run) => run.state))];
  return html`
    <h1>${t("Runs")} <small>${runs.length} ${t("of")} ${all.length}</small></h1>
    <form class="bar" onSubmit=${(event) => event.preventDefault()}>
      <label>${t("Filter")} <input type="search" value=${words} onInput=${(event) => setWords(event.target.value)} /></label>
      <label>${t("State")} <select value=${state} onChange=${(event) => setState(event.target.value)}>
        <option value="">${t("all")}</option>${states.map((one) => html`<option value=${one}>${t(one)}</option>`)}
      </select></label>
      <a class="button" aria-disabled=${chosen.length < 2} title=${t("Choose two runs or more to compare them")}
        href=${chosen.length < 2 ? undefined : `#/compare/${chosen.map(encodeURIComponent).join("/")}`}>${t("Compare")} (${chosen.length})</a>
    </form>
    ${all.length === 0 && html`<p>${t("No runs yet")}: <code>pipeline run pipelines/quickstart.yaml</code></p>`}
    ${all.length > 0 && runs.length === 0 && html`<p>${t("Nothing matches")}</p>`}
    ${runs.length > 0 && html`<div class="rows" ref=${box} onScroll=${(event) => setTop(event.target.scrollTop)} tabindex="0">
      <table aria-rowcount=${runs.length + 1}>
        <thead><tr><th></th><th>${t("State")}</th><th>${t("Pipeline")}</th><th>${t("Run")}</th><th>${t("Started")}</th>
          <th class="number">${t("Took")}</th><th>${t("Stages")}</th><th>${t("Figures")}</th></tr></thead>
        <tbody>
          <tr class="space" aria-hidden="true" style=${{ height: `${from * ROW}px` }}></tr>
          ${runs.slice(from, to).map((run, at) => row(run, from + at))}
          <tr class="space" aria-hidden="true" style=${{ height: `${(runs.length - to) * ROW}px` }}></tr>
        </tbody>
      </table>
    </div>`}
  `;
}

/** What differs in candidates, and what came out: the best of each column is marked. */
export function Comparison({ of }) {
  const columns = [...of.parameters.map((name) => ["parameters", name]), ...of.metrics.map((name) => ["metrics", name])];
  const cell = (candidate, [group, name]) => {
    const value = candidate[group][name];
    if (value === undefined || value === null) return html`<td></td>`;
    const best = group === "metrics" && candidate.best.includes(name);
    const text = group === "metrics" ? named(name, value) : value;
    return html`<td class=${group === "metrics" ? "number" : "code"}>${best ? html`<b title=${t("best")}>${text} ★</b>` : text}</td>`;
  };
  return html`
    <div class="scroll" tabindex="0"><table>
      <thead><tr><th></th>${columns.map(([, name]) => html`<th>${name}</th>`)}</tr></thead>
      <tbody>${of.candidates.map((candidate) => html`<tr><th scope="row">${candidate.name}</th>${columns.map((column) => cell(candidate, column))}</tr>`)}</tbody>
    </table></div>
    ${of.parameters.length === 0 && html`<p class="quiet">${t("no parameter differs")}</p>`}`;
}

/** Chosen runs: what differs, and their curves over one another. */
export function Compare({ runs }) {
  const compared = useAnswer("compare", { run: runs });
  return html`
    <h1>${t("Compare")}</h1>
    <p><a href="#/">${t("Back to all runs")}</a></p>
    <${Answer} of=${compared}>${(value) => html`<${Comparison} of=${value} />`}<//>
    <h2>${t("Training")}</h2>
    <${Trainings} runs=${runs} />`;
}

/** The curves of all trainings of some runs. */
function Trainings({ runs }) {
  const [trainings, tell] = useState(null);
  useEffect(() => {
    const stop = new AbortController();
    const ofRun = async (run) => {
      const { stages } = await ask("run", { run }, stop.signal);
      const trains = stages.filter((stage) => stage.kind === "train");
      return trains.map((stage) => ({ run, stage: stage.stage, label: `${short(run)} ${stage.stage}` }));
    };
    Promise.all(runs.map(ofRun)).then((lists) => tell(lists.flat()), () => tell([]));
    return () => stop.abort();
  }, [runs.join()]);
  if (!trainings) return html`<p class="quiet">${t("Loading")} …</p>`;
  return html`<${Charts} trainings=${trainings} />`;
}
