// The dashboard: numbers of the last minute, the map of KV blocks, the steps; and the inspector. All of it comes by one feed.

import {colours, kvMap, line, stepAt, timeline} from "./charts.js";
import {$, download, el, theme} from "./dom.js";
import {count, Feed, percent, seconds} from "./feed.js";
import {Inspector} from "./inspector.js";
import {drawFleet, drawLabelled} from "./panels.js";
import {Recorder, Recording} from "./recorder.js";
import {askForKey} from "./server.js";
import {language, say, translate} from "./words.js";

translate(document.body);
const live = new Feed(), recorder = new Recorder(), inspector = new Inspector(live), colour = colours(document.body);
let feed = live; // what is shown: this, or a moment of a recording
let recording = null;
const KEPT = "oneloop.record";
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
  [say("Running"), () => count(now().running), () => say("of {count} at most", {count: count(now().max_num_seqs)}), () => values(sample => sample.running)],
  [say("Waiting"), () => count(now().waiting), () => say("{count} preempted/min", {count: count(rate("num_preemptions", 60) * 60)}), () => values(sample => sample.waiting)],
  [say("Generated"), () => count(rate("generation_tokens")), () => say("tokens/s"), () => rates("generation_tokens")],
  [say("Prompts"), () => count(rate("prompt_tokens")), () => say("tokens/s, including cached"), () => rates("prompt_tokens")],
  [say("Prefix hits"), () => percent(hitRate()), () => say("of prompt tokens"), () => rates("prefix_cache_hits")],
  [say("KV in use"), () => percent(metric("kv_cache_usage_perc")(now())), () => say("of {count} blocks", {count: count(now().kv?.num_blocks)}), () => values(metric("kv_cache_usage_perc"))],
];
const LATENCIES = [[say("Time to first token"), "time_to_first_token_seconds"], [say("Between two tokens"), "inter_token_latency_seconds"], [say("Queue"), "request_queue_time_seconds"], [say("Whole request"), "e2e_request_latency_seconds"], [say("Step"), "step_time_seconds"], [say("Device idle between steps"), "gpu_idle_gap_seconds"], [say("Event loop late by"), "loop_lag_seconds"]];

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
  $("model").title = picker.title = `${last.device}, ${last.dtype}, ${say("{count} tokens of context", {count: count(last.max_model_len)})}`;
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
  drawFleet(feed);
  drawLabelled(last);
  const {steps} = feed.shown;
  timeline($("steps"), steps, last.now_s, colour);
  const decodes = steps.reduce((sum, step) => sum + step[4], 0), prompts = steps.reduce((sum, step) => sum + step[3], 0), captured = steps.filter(step => step[6]).length;
  const words = steps.length ? say("{count} steps: {prompts} prompt tokens, {decodes} decodes, {share} replayed as a graph.", {count: count(steps.length), prompts: count(prompts), decodes: count(decodes), share: percent(captured / steps.length)}) : say("No steps in the last minute.");
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
  $("kv-words").textContent = `${[say("Blocks of {size} tokens, {count} to a cell", {size: count(size), count: kv.blocks_per_cell}), kv.num_reserved ? say("{count} free ones are promised", {count: count(kv.num_reserved)}) : ""].filter(Boolean).join("; ")}.`;
  $("blocks").setAttribute("aria-label", say("{used} KV blocks used, {shared} shared, {cached} cached, {free} free", {used, shared, cached, free}));
}

function explainStep(event) {
  const canvas = $("steps"), step = now() && stepAt(feed.shown.steps, now().now_s, canvas.clientWidth, event.offsetX);
  canvas.dataset.pointed = step ? "true" : "";
  if (step) $("step-words").textContent = `${[say("Step {number}: {prompts} prompt tokens, {decodes} decodes, {time} from launch to end, {graph}", {number: count(step[0]), prompts: count(step[3]), decodes: count(step[4]), time: seconds(step[2] - step[1]), graph: step[6] ? say("a graph") : say("no graph")}), step[7] === null ? "" : say("idle before it {time}", {time: seconds(step[7])}), step[5] ? say("{count} preempted", {count: step[5]}) : ""].filter(Boolean).join(", ")}.`;
}

// --- looking back ------------------------------------------------------------------------------------------------------

const failed = error => { $("record-words").textContent = `${error.message}.`; };

// Shows a recording from its end on, or what comes now where it is null.
function play(opened) {
  recording = opened;
  $("playback").hidden = !recording;
  $("record-words").textContent = "";
  if (recording) {
    $("moment").max = recording.length - 1;
    $("moment").value = recording.length - 1;
    return seek();
  }
  feed = inspector.feed = live;
  draw();
}

function seek() {
  const at = Number($("moment").value), time = new Date(1000 * recording.seconds[at]).toLocaleString(language);
  try {
    feed = inspector.feed = recording.feed(at, feed.chosen);
    feed.isRecorded = true;
    $("moment-words").textContent = time;
    $("moment").setAttribute("aria-valuetext", time);
    draw();
  } catch { // it comes from anywhere
    play(null);
    failed(new Error(say("the recording is damaged")));
  }
}

async function open(file) {
  try { play(await Recording.of(file)); } catch (error) { failed(error); }
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

// While somebody looks: nothing is asked for a page behind others, unless its recorder is to go on.
let following = new AbortController();
function follow() {
  following.abort();
  if (document.hidden && !$("record-hidden").checked) return;
  following = new AbortController();
  live.follow(line => {
    recorder.take(live.last.wall_s, line);
    if (!recording) draw();
  }, error => {
    $("status").textContent = error.wantsKey ? say("needs a key") : say("not connected: {reason}", {reason: error.message});
    document.documentElement.dataset.ready = "true";
    if (error.wantsKey) changeKey(error.status === 403 ? error.message : "");
  }, following.signal);
}

$("record-hidden").checked = localStorage.getItem(KEPT) !== null;
$("record-hidden").addEventListener("input", event => event.target.checked ? localStorage.setItem(KEPT, "1") : localStorage.removeItem(KEPT));
$("look-back").addEventListener("click", async () => open(await recorder.file()));
$("record-export").addEventListener("click", async () => download(`oneloop-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.jsonl.gz`, "application/gzip", await recorder.file()));
$("record-open").addEventListener("click", () => $("record-file").click());
$("record-file").addEventListener("change", async event => { await open(event.target.files[0]); event.target.value = ""; });
$("moment").addEventListener("input", seek);
$("to-live").addEventListener("click", () => { play(null); $("look-back").focus(); });
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
