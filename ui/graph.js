// The graph of a run, as the program has laid it out.

import { html, useState } from "/vendor/preact.js";
import { seconds, t } from "/words.js";

const MARKS = { running: "▶", failed: "✗", done: "✓", cached: "↺", skipped: "–", started: "▶", waiting: "…" };
const WORST_FIRST = ["failed", "started", "waiting", "skipped", "done", "cached"];

/** How several stages stand together: as the one that most deserves a look. */
function together(states) {
  return WORST_FIRST.find((state) => states.includes(state)) || states[0];
}

/** A name that fits, with its middle left out; the whole name is the node's title. */
function fitted(name, width) {
  const most = Math.floor((width - 36) / 7.6);
  if (name.length <= most) return name;
  const end = Math.floor((most - 1) / 2);
  return `${name.slice(0, most - 1 - end)}…${name.slice(name.length - end)}`;
}

/** From the lower border of a node to the upper border of another, past the nodes of the layers between them. */
function path({ nodes, node_height, layer_height }, { from, to, via }) {
  const [above, below] = [nodes[from], nodes[to]];
  const between = via.flatMap((x, at) => {
    const top = above.y + (at + 1) * layer_height;
    return [[x, top], [x, top + node_height]];
  });
  let [x, y] = [above.x + above.width / 2, above.y + node_height];
  return [...between, [below.x + below.width / 2, below.y]].reduce((text, [nextX, nextY]) => {
    const middle = (y + nextY) / 2;
    const part = x === nextX ? `V${nextY}` : `C${x} ${middle} ${nextX} ${middle} ${nextX} ${nextY}`;
    [x, y] = [nextX, nextY];
    return text + part;
  }, `M${x} ${y}`);
}

export function Graph({ graph, stages, chosen, choose, open }) {
  const [scale, setScale] = useState(1);
  const isChosen = (box) => box.stages.some((at) => stages[at].stage === chosen);
  const node = (box) => {
    const members = box.stages.map((at) => stages[at]);
    const [{ stage: id, kind, declared }] = members;
    const state = together(members.map((stage) => stage.status));
    const took = members.reduce((sum, stage) => sum + (stage.seconds || 0), 0);
    const several = members.length > 1;
    const name = several ? `${declared} ×${members.length}` : id;
    const act = () => (several ? open(declared) : choose(id));
    const pressed = (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), act());
    return html`
      <g key=${name} class=${`node ${state} ${isChosen(box) ? "chosen" : ""}`} transform=${`translate(${box.x} ${box.y})`}
        role="button" tabindex="0" aria-label=${`${name}, ${kind}, ${t(state)}`} onClick=${act} onKeyDown=${pressed}>
        <title>${name}${"\n"}${kind}: ${t(state)}</title>
        ${several && html`<rect x="4" y="-4" width=${box.width} height=${graph.node_height} rx="6" class="behind" />`}
        <rect width=${box.width} height=${graph.node_height} rx="6" />
        <text x="12" y="19">${MARKS[state] || "?"} ${fitted(name, box.width)}</text>
        <text x="12" y="36" class="small">${kind}${took > 0 ? `, ${seconds(took)}` : ""}</text>
      </g>`;
  };
  return html`
    <div class="graph">
      <div class="zoom">
        <button type="button" aria-label="-" onClick=${() => setScale(Math.max(0.1, scale / 1.25))}>−</button>
        <button type="button" aria-label="100 %" onClick=${() => setScale(1)}>${Math.round(100 * scale)} %</button>
        <button type="button" aria-label="+" onClick=${() => setScale(Math.min(2, scale * 1.25))}>+</button>
      </div>
      <div class="canvas" tabindex="0">
        <svg width=${graph.width * scale} height=${graph.height * scale} viewBox=${`0 0 ${graph.width} ${graph.height}`} role="group" aria-label=${t("Graph")}>
          ${graph.edges.map((edge) => html`<path key=${`${edge.from} ${edge.to}`} d=${path(graph, edge)}
            class=${`edge ${isChosen(graph.nodes[edge.from]) || isChosen(graph.nodes[edge.to]) ? "chosen" : ""}`} />`)}
          ${graph.nodes.map(node)}
        </svg>
      </div>
    </div>`;
}
