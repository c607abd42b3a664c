// What takes room in the store, and what there is to compute on.

import { html } from "/vendor/preact.js";
import { bytes, seconds, t } from "/words.js";
import { Answer, useAnswer } from "/runs.js";

/** Who has leased a device; a lease that does not say its holder is one all the same. */
function leased({ leases }, device) {
  if (!leases) return "";
  const lease = leases.find((one) => one.kind === device.kind && one.index === device.index);
  return lease ? lease.held_by || t("another run") : t("free");
}

export function Machine() {
  const store = useAnswer("store", {});
  const devices = useAnswer("devices", {});
  return html`
    <h1>${t("Machine")}</h1>
    <h2>${t("Devices")}</h2>
    <${Answer} of=${devices}>${(value) => html`<div class="scroll" tabindex="0"><table>
      <thead><tr><th>${t("Kind")}</th><th>${t("Name")}</th><th class="number">${t("Memory")}</th><th>${t("Leased by")}</th><th>${t("In use by")}</th></tr></thead>
      <tbody>${value.devices.map((device) => html`<tr><td>${device.kind} ${device.index ?? ""}</td><td>${device.name}</td>
        <td class="number">${bytes(device.memory_total)}</td>
        <td>${leased(value, device)}</td>
        <td>${(device.processes || []).map((one) => one.name || one.pid).join(", ")}</td></tr>`)}</tbody></table></div>`}<//>
    <h2>${t("Store")}</h2>
    <${Answer} of=${store}>${(value) => html`
      <p>${bytes(value.bytes)}${value.unheld_bytes > 0 && html`, ${t("Free")}: ${bytes(value.unheld_bytes)} <code>pipeline cache gc</code>`}</p>
      <div class="scroll" tabindex="0"><table>
        <thead><tr><th>${t("Stage")}</th><th class="number">${t("Results kept")}</th><th class="number">${t("Size")}</th><th class="number">${t("Own")}</th><th class="number">${t("Took")}</th></tr></thead>
        <tbody>${value.groups.map((group) => html`<tr><th scope="row">${group.group}</th><td class="number">${group.results}</td><td class="number">${bytes(group.bytes)}</td>
          <td class="number">${bytes(group.own_bytes)}</td><td class="number">${seconds(group.seconds)}</td></tr>`)}</tbody></table></div>`}<//>`;
}
