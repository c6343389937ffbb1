// The dashboard: numbers of the last minute, the map of KV blocks, the steps; and the inspector. All of it comes by one feed.

import {colours, kvMap, line, stepAt, timeline} from "./charts.js";
import {$, el, theme} from "./dom.js";
import {count, Feed, percent, seconds} from "./feed.js";
import {Inspector} from "./inspector.js";
import {askForKey} from "./server.js";

const feed = new Feed(), inspector = new Inspector(feed), colour = colours(document.body);
const metric = name => sample => sample.metrics?.[name] ?? 0;
const now = () => feed.shown.last;
const rate = (name, over) => feed.shown.rate(name, over), rates = name => feed.shown.rates(name), values = read => feed.shown.values(read);
const hitRate = () => {
  const [queries, hits] = [rate("prefix_cache_queries", 60), rate("prefix_cache_hits", 60)];
  return queries ? hits / queries : null;
};
const latencies = name => [0.5, 0.9, 0.99].map(share => seconds(feed.shown.percentile(name, share)));

// [name, value, what stands below it, a line]
const TILES = [
  ["Running", () => count(now().running), () => `of ${count(now().max_num_seqs)} at most`, () => values(sample => sample.running)],
  ["Waiting", () => count(now().waiting), () => `${count(rate("num_preemptions", 60) * 60)} preempted/min`, () => values(sample => sample.waiting)],
  ["Generated", () => count(rate("generation_tokens")), () => "tokens/s", () => rates("generation_tokens")],
  ["Prompts", () => count(rate("prompt_tokens")), () => "tokens/s, including cached", () => rates("prompt_tokens")],
  ["Prefix hits", () => percent(hitRate()), () => "of prompt tokens", () => rates("prefix_cache_hits")],
  ["KV in use", () => percent(metric("kv_cache_usage_perc")(now())), () => `of ${count(now().kv?.num_blocks)} blocks`, () => values(metric("kv_cache_usage_perc"))],
];
const LATENCIES = [["Time to first token", "time_to_first_token_seconds"], ["Between two tokens", "inter_token_latency_seconds"], ["Queue", "request_queue_time_seconds"], ["Whole request", "e2e_request_latency_seconds"], ["Step", "step_time_seconds"], ["Device idle between steps", "gpu_idle_gap_seconds"], ["Event loop late by", "loop_lag_seconds"]];

const tiles = TILES.map(([name, value, below, points]) => {
  const parts = {value: el("div", {class: "value"}, "–"), below: el("div", {class: "dim"}, ""), canvas: el("canvas", {"aria-hidden": "true"})};
  $("tiles").append(el("div", {class: "tile"}, el("h3", null, name), parts.value, parts.below, parts.canvas));
  return {...parts, draw: () => { parts.value.textContent = value(); parts.below.textContent = below(); line(parts.canvas, points(), now().now_s, colour("decode")); }};
});
const latencyRows = LATENCIES.map(([name, histogram]) => {
  const cells = [0, 1, 2].map(() => el("td", {class: "number"}, "–"));
  $("latencies").append(el("tr", null, el("th", {scope: "row"}, name), cells));
  return () => latencies(histogram).forEach((text, at) => { cells[at].textContent = text; });
});

function draw() {
  if (!feed.last) return;
  const {last} = feed.shown, state = last?.status === "loaded" ? "" : last?.status ?? "";
  $("status").textContent = feed.last.status === "ready" ? last?.reason ?? state : feed.last.status;
  if (!last) return;
  drawModels(last);
  if (location.hash.startsWith("#requests")) inspector.update();
  else drawOverview(last);
  document.documentElement.dataset.ready = "true";
}

// Its name; where there are several, all of them to choose from, with where each stands.
function drawModels(last) {
  const all = [...[...feed.models.values()].map(each => each.last), ...feed.unloaded], picker = $("models");
  $("model").hidden = all.length > 1;
  picker.hidden = all.length < 2;
  $("model").textContent = last.name;
  $("model").title = picker.title = `${last.device}, ${last.dtype}, ${count(last.max_model_len)} tokens of context`;
  const words = all.map(({name, status}) => status === "loaded" ? name : `${name} (${status})`);
  if (picker.length !== all.length || words.some((text, at) => picker.options[at].text !== text)) {
    picker.replaceChildren(...all.map(({name}, at) => el("option", {value: name, disabled: at >= feed.models.size ? "" : null}, words[at])));
  }
  picker.value = last.name;
}

function drawOverview(last) {
  for (const tile of tiles) tile.draw();
  for (const row of latencyRows) row();
  drawBlocks(last);
  const {steps} = feed.shown;
  timeline($("steps"), steps, last.now_s, colour);
  const decodes = steps.reduce((sum, step) => sum + step[4], 0), prompts = steps.reduce((sum, step) => sum + step[3], 0), captured = steps.filter(step => step[6]).length;
  const words = steps.length ? `${count(steps.length)} steps: ${count(prompts)} prompt tokens, ${count(decodes)} decodes, ${percent(captured / steps.length)} replayed as a graph.` : "No steps in the last minute.";
  $("steps").setAttribute("aria-label", words);
  if (!$("steps").dataset.pointed) $("step-words").textContent = words;
}

function drawBlocks({kv, kv_block_size: size}) {
  const cells = Uint8Array.from(atob(kv.cells), character => character.charCodeAt(0));
  kvMap($("blocks"), cells, colour);
  const sums = [0, 0, 0];
  for (let at = 0; at < cells.length; at++) sums[at % 3] += cells[at] / 255 * Math.min(kv.blocks_per_cell, kv.num_blocks - Math.floor(at / 3) * kv.blocks_per_cell);
  const [used, shared, cached] = sums.map(Math.round), free = Math.max(0, kv.num_blocks - used - shared - cached);
  for (const [name, value] of Object.entries({used, shared, cached, free})) $(`kv-${name}`).textContent = count(value);
  $("kv-words").textContent = `Blocks of ${count(size)} tokens${kv.blocks_per_cell > 1 ? `, ${kv.blocks_per_cell} to a cell` : ""}${kv.num_reserved ? `; ${count(kv.num_reserved)} free ones are promised` : ""}.`;
  $("blocks").setAttribute("aria-label", `${used} KV blocks used, ${shared} shared, ${cached} cached, ${free} free`);
}

function explainStep(event) {
  const canvas = $("steps"), step = now() && stepAt(feed.shown.steps, now().now_s, canvas.clientWidth, event.offsetX);
  canvas.dataset.pointed = step ? "true" : "";
  if (step) $("step-words").textContent = `Step ${count(step[0])}: ${count(step[3])} prompt tokens, ${count(step[4])} decodes, ${seconds(step[2] - step[1])} from launch to end, ${step[6] ? "a graph" : "no graph"}${step[7] === null ? "" : `, idle before it ${seconds(step[7])}`}${step[5] ? `, ${step[5]} preempted` : ""}.`;
}

function route() {
  const isRequests = location.hash.startsWith("#requests");
  $("overview").hidden = isRequests;
  $("inspector").hidden = !isRequests;
  for (const [id, current] of [["to-overview", !isRequests], ["to-requests", isRequests]]) current ? $(id).setAttribute("aria-current", "page") : $(id).removeAttribute("aria-current");
  draw();
}

async function changeKey(reason) {
  if ($("key-dialog").open) return;
  if (await askForKey($("key-dialog"), reason)) follow();
}

// While somebody looks: nothing is asked for a page behind others.
let following = new AbortController();
function follow() {
  following.abort();
  if (document.hidden) return;
  following = new AbortController();
  feed.follow(draw, error => {
    $("status").textContent = error.wantsKey ? "needs a key" : `not connected: ${error.message}`;
    document.documentElement.dataset.ready = "true";
    if (error.wantsKey) changeKey(error.status === 403 ? error.message : "");
  }, following.signal);
}

$("key").addEventListener("click", () => changeKey(""));
$("models").addEventListener("change", event => { feed.chosen = event.target.value; draw(); });
$("steps").addEventListener("pointermove", explainStep);
$("steps").addEventListener("pointerleave", () => { $("steps").dataset.pointed = ""; });
addEventListener("hashchange", route);
addEventListener("resize", draw);
document.addEventListener("visibilitychange", follow);
addEventListener("pagehide", () => following.abort());
addEventListener("pageshow", event => { if (event.persisted) follow(); });
addEventListener("themechange", draw);
theme($("theme"));
route();
follow();
