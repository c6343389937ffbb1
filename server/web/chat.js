// The chat page: puts conversation, messages, settings and library together, and asks for answers.

import {stream} from "./answer.js";
import {$, announce, button, download, el, theme} from "./dom.js";
import {heatmap, score} from "./heatmap.js";
import * as library from "./library.js";
import {Message} from "./message.js";
import * as models from "./models.js";
import * as pictures from "./pictures.js";
import {askForKey, ServerError} from "./server.js";
import * as settings from "./settings.js";
import * as tree from "./tree.js";

const KEEP_MS = 2000; // a reload costs at most so much of an answer
const WIDE = matchMedia("(min-width: 60rem)");
let whole = tree.conversation(); // what is shown
let running = null; // {whole, node, message, stop}: the answer that is coming

// --- one conversation ------------------------------------------------------------------------------------------------

function show() {
  const nodes = tree.path(whole);
  const log = $("log"), follows = atEnd();
  log.replaceChildren(...nodes.map(node => messageOf(node).element));
  $("welcome").hidden = nodes.length > 0;
  document.title = nodes.length ? `${tree.titleOf(whole)} · oneloop` : "oneloop";
  if (follows) scrollToEnd();
  setSending();
}

function messageOf(node) {
  const own = whole;
  if (running?.node === node) return running.message;
  const act = change => {
    if (running) return announce("An answer is still coming.");
    change();
    show();
    keep(own);
  };
  return new Message(node, tree.place(own, node), {
    edit: text => act(() => answer(tree.add(own, node.parent, {role: "user", content: text, ...(node.pictures ? {pictures: node.pictures} : {})}))),
    again: () => act(() => answer(own.nodes[node.parent] ?? null)),
    choose: offset => act(() => tree.choose(own, node, offset)),
    result: (call, text) => act(() => answerTool(node, call, text)),
    answered: call => tree.path(own).some(each => each.role === "tool" && each.callId === call.id),
    score: () => scored(node),
    namesModel: models.areSeveral,
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
  const nodes = tree.path(whole), upTo = nodes.slice(0, nodes.indexOf(node) + 1);
  try {
    return heatmap(await score(tree.messages(upTo, settings.system()), node.stats.prompt, models.areSeveral() ? node.model : undefined));
  } catch (error) {
    return el("p", {class: "error", role: "alert"}, inWords(error));
  }
}

// An answer behind `node`, whose end nobody waits for. It belongs to the conversation it began in, whatever is shown meanwhile.
function answer(node) {
  const own = whole, before = tree.path(own), sent = before.slice(0, before.indexOf(node) + 1);
  const made = tree.add(own, node?.id ?? null, {role: "assistant", content: "", format: settings.format()});
  const abort = new AbortController();
  const message = messageOf(made);
  const run = running = {whole: own, node: made, message, stop: () => abort.abort()};
  let drawn = false, kept = performance.now();
  const draw = () => {
    if (drawn) return;
    drawn = true;
    requestAnimationFrame(() => {
      drawn = false;
      if (running !== run) return; // it has ended, and is drawn as that
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
  finish(run, draw, abort.signal, () => ({messages: tree.messages(sent, settings.system()), ...settings.fields(), ...models.fields()}));
}

async function finish(run, draw, signal, body) {
  const {node, message} = run;
  try {
    await stream(node, body(), signal, draw);
    announce("The answer is there.");
  } catch (error) {
    if (error.name === "AbortError") node.stopped = true;
    else node.error = inWords(error);
    if (error instanceof ServerError && error.wantsKey) $("key").click();
  }
  if (!node.content && !node.error && !node.calls && !node.stopped) node.note = node.finish === "length" ? "The limit of tokens came before an answer." : "It ended before a word of an answer.";
  const follows = atEnd();
  if (running === run) running = null;
  message.update(false);
  setSending();
  if (follows && whole === run.whole) scrollToEnd();
  await keep(run.whole);
  if (models.areSeveral()) await models.refresh().then(setSeeing, () => {}); // others are loaded now; who does not answer has been told of
}

function inWords(error) {
  if (error instanceof ServerError) return error.message;
  return error instanceof TypeError ? `The server does not answer (${error.message}).` : error.message;
}

const atEnd = () => { const page = $("scroll"); return page.scrollHeight - page.scrollTop - page.clientHeight < 90; };
function scrollToEnd() { $("scroll").scrollTop = $("scroll").scrollHeight; }

function send() {
  const input = $("text"), text = input.value.trim();
  if (running || !(text || pictures.areThere())) return;
  input.value = "";
  grow();
  const added = pictures.take();
  answer(tree.add(whole, tree.path(whole).at(-1)?.id ?? null, {role: "user", content: text, ...(added.length ? {pictures: added} : {})}));
  keep(whole);
}

function setSending() {
  $("send").textContent = running ? "Stop" : "Send";
  $("send").classList.toggle("main", !running);
}

const setSeeing = () => { $("picture").hidden = !models.sees(); };

function grow() {
  const input = $("text");
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight + 2, innerHeight * 0.4)}px`;
}

// --- all conversations -----------------------------------------------------------------------------------------------

async function keep(changed) {
  if (changed.roots.length) await library.save(changed);
  await list();
}

async function list() {
  const words = $("search").value.trim().toLowerCase(), all = await library.all();
  const found = words ? all.filter(each => tree.holds(each, words)) : all;
  $("conversations").replaceChildren(...found.map(each => el("li", {class: each.id === whole.id ? "current" : null},
    button(tree.titleOf(each), () => open(each), {class: "plain title", "aria-current": each.id === whole.id ? "true" : null}),
    button("✕", () => erase(each), {class: "plain small", "aria-label": `Delete ${tree.titleOf(each)}`}))));
  $("found").textContent = words ? `${found.length} of ${all.length}` : all.length ? "" : "Nothing yet. What you write stays in this browser.";
  $("export").disabled = !all.length;
}

function open(chosen) {
  whole = running?.whole.id === chosen.id ? running.whole : chosen;
  pictures.forgive();
  show();
  list();
  scrollToEnd();
  if (!WIDE.matches) toggle("library", false);
  $("text").focus();
}

async function erase(chosen) {
  const dialog = $("erase-dialog");
  dialog.querySelector("b").textContent = tree.titleOf(chosen);
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise(resolve => dialog.addEventListener("close", resolve, {once: true}));
  if (dialog.returnValue !== "erase") return;
  if (running?.whole.id === chosen.id) { running.whole.roots = []; running.stop(); }
  await library.remove(chosen.id);
  if (whole.id === chosen.id) open(tree.conversation());
  else list();
}

async function importFiles() {
  try {
    for (const file of $("import").files) for (const each of tree.imported(await file.text())) await library.save(each);
    $("found").textContent = "";
    await list();
    announce("Imported.");
  } catch (error) {
    $("found").textContent = `Not imported: ${error.message}.`;
  }
  $("import").value = "";
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
  const shown = ["library", "settings"].find(name => !$(name).hidden && !(WIDE.matches && (running || name === "library")));
  if (!shown) return running?.stop();
  const inside = $(shown).contains(document.activeElement);
  toggle(shown, false);
  if (inside) $(`${shown}-toggle`).focus();
}

async function greet() {
  try {
    const health = await fetchHealth();
    $("status").textContent = health.status === "ok" ? "" : health.status === "loading" && health.total ? `loading: ${health.phase} ${Math.floor(100 * health.done / health.total)} %` : `${health.status}${health.reason ? `: ${health.reason}` : ""}`;
    if (health.status === "ok") {
      await models.refresh();
      setSeeing();
    } else setTimeout(greet, 2000); // until there is a model; then nothing is asked any more
  } catch (error) {
    $("status").textContent = error.wantsKey ? "needs a key" : inWords(error);
    if (error.wantsKey) $("key").classList.add("main");
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

$("form").addEventListener("submit", event => { event.preventDefault(); if (running) running.stop(); else send(); });
$("text").addEventListener("keydown", event => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } });
$("text").addEventListener("input", grow);
$("new").addEventListener("click", () => open(tree.conversation()));
$("search").addEventListener("input", list);
$("export").addEventListener("click", async () => download(`oneloop-${new Date().toISOString().slice(0, 10)}.json`, "application/json", JSON.stringify({oneloop: tree.FORMAT, conversations: await library.all()}, null, 1)));
$("import-button").addEventListener("click", () => $("import").click());
$("import").addEventListener("change", importFiles);
$("key").addEventListener("click", changeKey);
$("models").addEventListener("change", () => { models.keep(); setSeeing(); pictures.forgive(); });
pictures.listen(document.querySelector("main"), models.sees);
for (const name of ["library", "settings"]) {
  $(`${name}-toggle`).addEventListener("click", () => toggle(name));
  $(`${name}-close`).addEventListener("click", () => { toggle(name, false); $(`${name}-toggle`).focus(); });
}
for (const example of document.querySelectorAll(".example")) example.addEventListener("click", () => { $("text").value = example.textContent; grow(); $("text").focus(); });
addEventListener("keydown", event => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) escape();
  if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); toggle("library", true); $("search").focus(); }
});

theme($("theme"));
settings.fillPanel($("settings-panel"));
toggle("library", WIDE.matches);
show();
await list();
const latest = (await library.all())[0];
if (latest && location.hash !== "#new") open(latest);
greet();
document.documentElement.dataset.ready = "true";
