// The page: which view an address shows, and what all views share.

import { html, render, useEffect, useState } from "/vendor/preact.js";
import { takeToken } from "/api.js";
import { language, speak, t } from "/words.js";
import { Runs } from "/runs.js";
import { Run } from "/run.js";
import { Compare } from "/runs.js";
import { Machine } from "/machine.js";

/** The parts of the address behind `#/`. */
function place() {
  return location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
}

function View({ at }) {
  const [view, ...rest] = at;
  if (view === "run") return html`<${Run} key=${rest[0]} run=${rest[0]} view=${rest[1] || "graph"} stage=${rest[2]} />`;
  if (view === "compare") return html`<${Compare} runs=${rest} />`;
  if (view === "machine") return html`<${Machine} />`;
  return html`<${Runs} />`;
}

function Page() {
  const [at, go] = useState(place());
  const [, again] = useState(0);
  useEffect(() => {
    const moved = () => go(place());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  const choose = (event) => {
    speak(event.target.value);
    again((count) => count + 1);
  };
  const here = at[0] || "runs";
  const link = (name, to, text) =>
    html`<a href=${`#/${to}`} aria-current=${here === name ? "page" : undefined}>${t(text)}</a>`;
  return html`
    <a class="skip" href="#main">${t("Runs")}</a>
    <header>
      <strong>pipeline</strong>
      <nav>${link("runs", "", "Runs")}${link("machine", "machine", "Machine")}</nav>
      <label class="quiet">
        <span class="unseen">${t("Language")}</span>
        <select value=${language()} onChange=${choose}><option value="en">English</option><option value="zh">中文</option></select>
      </label>
    </header>
    <main id="main"><${View} at=${at} /></main>
  `;
}

takeToken();
speak(language());
render(html`<${Page} />`, document.getElementById("page"));
