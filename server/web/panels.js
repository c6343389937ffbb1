// Tables of the dashboard: every engine beside the others, and metrics with labels: adapters and KV tiers, where the server has them.

import {$, el} from "./dom.js";
import {count, percent} from "./feed.js";
import {say} from "./words.js";

const numeric = text => el("td", {class: "number"}, text);

// A line a model, or a line an engine of one that has several: where it runs, and what it does.
export function drawFleet(feed) {
  const loaded = [...feed.models.values()].map(model => {
    const {name, device, status, running, waiting, metrics} = model.last;
    return [name, device, status, count(running), count(waiting), count(model.rate("generation_tokens")), percent(metrics?.kv_cache_usage_perc ?? null)];
  });
  const unloaded = feed.unloaded.map(({name, status}) => [name, "–", status, "–", "–", "–", "–"]);
  fill("fleet", [...loaded, ...unloaded].map(([name, device, status, ...numbers]) => el("tr", null, el("th", {scope: "row"}, name), el("td", null, device), el("td", null, status), numbers.map(numeric))));
}

// [element, prefixes of the metrics' names]
const GROUPS = [["adapters", ["lora_"]], ["tiers", ["kv_offload_", "kv_tier_", "external_"]]];

// Metrics by their names without the prefix; with each the labels of a sample.
export function drawLabelled({metrics, labelled = {}}) {
  const plain = Object.entries(metrics ?? {}).filter(([, value]) => typeof value === "number").map(([name, value]) => [name, [[{}, value]]]);
  for (const [id, prefixes] of GROUPS) {
    const found = [...plain, ...Object.entries(labelled)].flatMap(([name, samples]) => {
      const prefix = prefixes.find(each => name.startsWith(each));
      return prefix ? samples.map(([labels, value]) => [name.slice(prefix.length).replaceAll("_", " "), Object.values(labels).join(", "), value]) : [];
    });
    $(id).parentElement.parentElement.hidden = !found.length;
    fill(id, found.map(([name, labels, value]) => el("tr", null, el("th", {scope: "row"}, name), el("td", null, labels), numeric(count(value)))));
  }
}

// Rows are drawn anew only where they say something else: a reader may have chosen text in them.
function fill(id, rows) {
  const body = $(id), text = rows.map(row => row.textContent).join("\n");
  if (body.dataset.shown === text) return;
  body.dataset.shown = text;
  body.replaceChildren(...rows);
}
