// The chat page: puts conversation, messages, settings and library together, and asks for answers.

import {stream} from "./answer.js";
import * as attachments from "./attachments.js";
import * as compare from "./compare.js";
import {$, announce, el, theme} from "./dom.js";
import {heatmap, score} from "./heatmap.js";
import {install} from "./install.js";
import * as library from "./library.js";
import {Message} from "./message.js";
import * as models from "./models.js";
import {askForKey, ServerError} from "./server.js";
import * as settings from "./settings.js";
import * as shelf from "./shelf.js";
import * as tree from "./tree.js";
import {say, translate} from "./words.js";

const KEEP_MS = 2000; // a reload costs at most so much of an answer
const WIDE = matchMedia("(min-width: 60rem)");
let whole = tree.conversation(); // what is shown
const runs = new Set(); // {whole, node, message, stop}: the answers that are coming

// --- one conversation ------------------------------------------------------------------------------------------------

function show() {
  const nodes = tree.path(whole);
  const log = $("log"), follows = atEnd();
  log.replaceChildren(...nodes.map((node, at) => elementOf(node, at === nodes.length - 1)));
  $("welcome").hidden = nodes.length > 0;
  document.title = nodes.length ? `${tree.titleOf(whole)} · oneloop` : "oneloop";
  if (follows) scrollToEnd();
  setSending();
}

// Two answers to compare stand side by side, the one that the conversation goes on with marked.
function elementOf(node, isLast) {
  const all = tree.beside(whole, node);
  if (all.length < 2) return messageOf(node, {isLast}).element;
  return el("div", {class: "pair"}, all.map(each => {
    const {element} = messageOf(each, {isLast: isLast && each === node, isBeside: each !== node});
    element.classList.toggle("preferred", each === node);
    return element;
  }));
}

function messageOf(node, {isLast = false, isBeside = false} = {}) {
  const own = whole, run = [...runs].find(each => each.node === node);
  if (run) return run.message;
  const act = change => {
    if (runs.size) return announce(say("An answer is still coming."));
    change();
    show();
    keep(own);
  };
  const {pictures, sounds, texts} = node, attached = Object.fromEntries(Object.entries({pictures, sounds, texts}).filter(([, each]) => each));
  const edited = node.role === "user"
    ? content => ask(tree.add(own, node.parent, {role: "user", content, ...attached}))
    : content => tree.add(own, node.parent, {role: "assistant", content, ...(node.model ? {model: node.model} : {})});
  return new Message(node, tree.place(own, node), {
    edit: text => act(() => edited(text)),
    again: () => act(() => answer(own.nodes[node.parent] ?? null)),
    choose: offset => act(() => tree.choose(own, node, offset)),
    result: (call, text) => act(() => answerTool(node, call, text)),
    answered: call => tree.path(own).some(each => each.role === "tool" && each.callId === call.id),
    score: () => scored(node),
    namesModel: models.areSeveral,
    goOn: isLast && !node.calls ? () => act(() => goOn(node)) : null,
    prefer: isBeside ? () => act(() => tree.prefer(own, node)) : null,
  });
}

// The result of a tool; the model goes on once there is one of each call.
function answerTool(node, call, text) {
  const last = tree.path(whole).at(-1), from = last === node || last.role === "tool" ? last : node;
  const added = tree.add(whole, from.id, {role: "tool", callId: call.id, content: text});
  const given = tree.path(whole).filter(each => each.role === "tool").map(each => each.callId);
  if (node.calls.every(each => given.includes(each.id))) answer(added);
}

async function scored(node) {
  try {
    const sent = tree.messages([...upTo(whole, whole.nodes[node.parent]), node], settings.current(node.preset).system);
    return heatmap(await score(sent, node.stats.prompt, models.areSeveral() ? node.model : undefined));
  } catch (error) {
    return el("p", {class: "error", role: "alert"}, inWords(error));
  }
}

// The nodes from the first on to `node`.
function upTo(own, node) {
  const found = [];
  for (let each = node; each; each = own.nodes[each.parent]) found.unshift(each);
  return found;
}

// Answers to `node`: one, or two side by side.
function ask(node) {
  const second = compare.second(), pair = second ? `${Date.now()}` : null;
  answer(node, {pair});
  if (!second) return;
  const first = tree.path(whole).at(-1);
  answer(node, {pair, ...second});
  tree.prefer(whole, first);
  show();
}

// An answer behind `node`, by a model and a preset other than chosen where they are named.
function answer(node, {pair, model, preset} = {}) {
  const own = whole, wanted = settings.current(preset), sent = upTo(own, node);
  const made = tree.add(own, node?.id ?? null, {role: "assistant", content: "", format: settings.format(wanted), ...(pair ? {pair} : {}), ...(preset ? {preset} : {})});
  start(made, () => ({messages: tree.messages(sent, wanted.system), ...settings.fields(wanted), ...models.fields(model)}));
}

// More of an answer that was cut off, stopped or edited. A form of the answer would begin anew in its middle, so the rest has none.
function goOn(node) {
  const own = whole, wanted = settings.current(node.preset);
  for (const name of ["error", "stopped", "finish", "note"]) delete node[name];
  if (wanted.form !== "none") node.note = say("The rest has no form.");
  start(node, () => ({
    messages: tree.messages(upTo(own, node), wanted.system), ...settings.fields({...wanted, form: "none"}), ...models.fields(node.model),
    add_generation_prompt: false, continue_final_message: true,
  }));
}

// Asks for what `body()` says, whose end nobody waits for. It belongs to the conversation it began in, whatever is shown meanwhile.
function start(made, body) {
  const own = whole, abort = new AbortController(), message = messageOf(made, {isLast: true});
  const run = {whole: own, node: made, message, stop: () => abort.abort()};
  let drawn = false, kept = performance.now();
  runs.add(run);
  const draw = () => {
    if (drawn) return;
    drawn = true;
    requestAnimationFrame(() => {
      drawn = false;
      if (!runs.has(run)) return; // it has ended, and is drawn as that
      const follows = atEnd();
      message.update(true);
      if (follows && whole === own) scrollToEnd();
      if (performance.now() - kept > KEEP_MS) {
        kept = performance.now();
        library.save(own);
      }
    });
  };
  message.update(true);
  show();
  scrollToEnd();
  finish(run, draw, abort.signal, body);
}

async function finish(run, draw, signal, body) {
  const {node, message} = run;
  try {
    await stream(node, body(), signal, draw);
    announce(say("The answer is there."));
  } catch (error) {
    if (error.name === "AbortError") node.stopped = true;
    else node.error = inWords(error);
    if (error instanceof ServerError && error.wantsKey) $("key").click();
  }
  if (!node.content && !node.error && !node.calls && !node.stopped) node.note = node.finish === "length" ? say("The limit of tokens came before an answer.") : say("It ended before a word of an answer.");
  const follows = atEnd();
  runs.delete(run);
  message.update(false);
  if (node.pair && whole === run.whole && !runs.size) show(); // one of them can be chosen now
  setSending();
  if (follows && whole === run.whole) scrollToEnd();
  await keep(run.whole);
  if (models.areSeveral()) await models.refresh().then(setMeans, () => {}); // others are loaded now; who does not answer has been told of
}

function stopAll() { for (const run of runs) run.stop(); }

function inWords(error) {
  if (error instanceof ServerError) return error.message;
  return error instanceof TypeError ? say("The server does not answer ({reason}).", {reason: error.message}) : error.message;
}

const atEnd = () => { const page = $("scroll"); return page.scrollHeight - page.scrollTop - page.clientHeight < 90; };
function scrollToEnd() { $("scroll").scrollTop = $("scroll").scrollHeight; }

function send() {
  const input = $("text"), text = input.value.trim();
  if (runs.size || !(text || attachments.areThere())) return;
  input.value = "";
  grow();
  ask(tree.add(whole, tree.path(whole).at(-1)?.id ?? null, {role: "user", content: text, ...attachments.take()}));
  keep(whole);
}

function setSending() {
  $("send").textContent = runs.size ? say("Stop") : say("Send");
  $("send").classList.toggle("main", !runs.size);
}

// What the model that is asked reads and hears decides on what is offered.
function setMeans() {
  attachments.refresh();
  compare.fill();
}

function grow() {
  const input = $("text");
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight + 2, innerHeight * 0.4)}px`;
}

// --- all conversations -----------------------------------------------------------------------------------------------

async function keep(changed) {
  if (changed.roots.length) await library.save(changed);
  await shelf.list();
}

// The conversation as this page has it, which may be ahead of what is kept.
const latest = chosen => whole.id === chosen.id ? whole : [...runs].find(run => run.whole.id === chosen.id)?.whole ?? chosen;

function open(chosen) {
  whole = latest(chosen);
  attachments.forgive();
  show();
  shelf.list();
  scrollToEnd();
  if (!WIDE.matches) toggle("library", false);
  $("text").focus();
}

function erased(id) {
  for (const run of runs) if (run.whole.id === id) { run.whole.roots = []; run.stop(); }
  if (whole.id === id) open(tree.conversation());
}

// --- the page around it ----------------------------------------------------------------------------------------------

function toggle(name, wanted) {
  const panel = $(name), shown = wanted ?? panel.hidden;
  panel.hidden = !shown;
  $(`${name}-toggle`).setAttribute("aria-expanded", String(shown));
  if (shown && !WIDE.matches) {
    toggle(name === "library" ? "settings" : "library", false);
    panel.querySelector("button, input, textarea").focus();
  }
}

// Closes what lies over the chat on a narrow screen; or else stops the answer; or else closes the settings.
function escape() {
  const shown = ["library", "settings"].find(name => !$(name).hidden && !(WIDE.matches && (runs.size || name === "library")));
  if (!shown) return stopAll();
  const inside = $(shown).contains(document.activeElement);
  toggle(shown, false);
  if (inside) $(`${shown}-toggle`).focus();
}

async function greet() {
  try {
    const health = await fetchHealth();
    $("status").textContent = health.status === "ok" ? "" : health.status === "loading" && health.total ? say("loading: {phase} {percent} %", {phase: health.phase, percent: Math.floor(100 * health.done / health.total)}) : `${health.status}${health.reason ? `: ${health.reason}` : ""}`;
    if (health.status === "ok") {
      await models.refresh();
      setMeans();
    } else setTimeout(greet, 2000); // until there is a model; then nothing is asked any more
  } catch (error) {
    $("status").textContent = error.wantsKey ? say("needs a key") : inWords(error);
    if (error.wantsKey) $("key").classList.add("main");
    else setTimeout(greet, 5000); // until it answers again
  }
}

// 503 is an answer here.
async function fetchHealth() {
  const response = await fetch(new URL("../../health", import.meta.url), {cache: "no-store"});
  return response.json();
}

async function changeKey() {
  if ($("key-dialog").open) return;
  if (await askForKey($("key-dialog"), "")) {
    $("key").classList.remove("main");
    greet();
  }
}

$("form").addEventListener("submit", event => { event.preventDefault(); if (runs.size) stopAll(); else send(); });
$("text").addEventListener("keydown", event => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } });
$("text").addEventListener("input", grow);
$("new").addEventListener("click", () => open(tree.conversation()));
$("key").addEventListener("click", changeKey);
$("models").addEventListener("change", () => { models.keep(); setMeans(); attachments.forgive(); });
attachments.listen(document.querySelector("main"));
shelf.listen({isShown: each => each.id === whole.id, open, latest, erased});
for (const name of ["library", "settings"]) {
  $(`${name}-toggle`).addEventListener("click", () => toggle(name));
  $(`${name}-close`).addEventListener("click", () => { toggle(name, false); $(`${name}-toggle`).focus(); });
}
for (const example of document.querySelectorAll(".example")) example.addEventListener("click", () => { $("text").value = example.textContent; grow(); $("text").focus(); });
addEventListener("keydown", event => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) escape();
  if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); toggle("library", true); $("search").focus(); }
});

translate(document.body);
theme($("theme"));
settings.fillPanel($("settings-panel"));
compare.fill();
toggle("library", WIDE.matches);
show();
await shelf.list();
const newest = (await library.all())[0];
if (newest && location.hash !== "#new") open(newest);
greet();
install();
document.documentElement.dataset.ready = "true";
