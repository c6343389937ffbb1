// The list of conversations: pinned ones, folders, and the rest; what can be done with each; and files of them.

import {$, announce, button, download, el} from "./dom.js";
import * as library from "./library.js";
import * as tree from "./tree.js";
import {say} from "./words.js";

const closed = new Set(); // names of folders
let acts = null; // {isShown(whole), open(whole), latest(whole), erased(id)}

// Fills the list, as the search field wants it.
export async function list() {
  const words = $("search").value.trim().toLowerCase(), all = await library.all();
  const found = words ? all.filter(each => tree.holds(each, words)) : all;
  const loose = found.filter(each => !each.folder || each.pinned);
  $("conversations").replaceChildren(...loose.filter(each => each.pinned).map(line), ...foldersOf(found).map(folder), ...loose.filter(each => !each.pinned).map(line));
  $("found").textContent = words ? say("{count} of {all}", {count: found.length, all: all.length}) : all.length ? "" : say("Nothing yet. What you write stays in this browser.");
  $("export").disabled = !all.length;
  $("folders").replaceChildren(...foldersOf(all).map(([name]) => el("option", {value: name})));
}

// [[name, conversations]] by name; pinned ones stand above all folders.
function foldersOf(all) {
  const found = new Map();
  for (const each of all) if (each.folder && !each.pinned) found.set(each.folder, [...found.get(each.folder) ?? [], each]);
  return [...found].sort(([one], [other]) => one.localeCompare(other));
}

function folder([name, within]) {
  const box = el("details", {open: !closed.has(name)}, el("summary", null, `${name} (${within.length})`), el("ul", null, within.map(line)));
  box.addEventListener("toggle", () => box.open ? closed.delete(name) : closed.add(name));
  return el("li", {class: "folder"}, box);
}

function line(each) {
  const isShown = acts.isShown(each), title = tree.titleOf(each);
  return el("li", {class: isShown ? "current" : null},
    button(each.pinned ? [el("span", {"aria-label": say("Pinned"), role: "img"}, "★"), ` ${title}`] : title, () => acts.open(each), {class: "plain title", "aria-current": isShown ? "true" : null}),
    button("⋯", () => change(each), {class: "plain small", "aria-label": say("Change {title}", {title}), title: say("Rename, pin, folder, share")}),
    button("✕", () => erase(each), {class: "plain small", "aria-label": say("Delete {title}", {title})}));
}

// What a dialog was closed with: the value of a button, "" for Escape.
function closedWith(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise(resolve => dialog.addEventListener("close", () => resolve(dialog.returnValue), {once: true}));
}

// Title, folder and pin of one; or it as a file.
async function change(listed) {
  const chosen = acts.latest(listed), [title, folder, pinned] = [$("change-title"), $("change-folder"), $("change-pinned")];
  title.value = chosen.title;
  title.placeholder = tree.titleOf({...chosen, title: ""});
  folder.value = chosen.folder ?? "";
  pinned.checked = Boolean(chosen.pinned);
  const done = await closedWith($("change-dialog"));
  if (done === "save") {
    Object.assign(chosen, {title: title.value.trim(), folder: folder.value.trim(), pinned: pinned.checked});
    await library.save(chosen);
    await list();
  }
  if (done === "file") asFile(fileName(chosen), [chosen]);
  if (done === "markdown") download(`${fileName(chosen)}.md`, "text/markdown", tree.asMarkdown(chosen));
}

const fileName = whole => tree.titleOf(whole).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation";
const asFile = (name, conversations) => download(`${name}.json`, "application/json", JSON.stringify({oneloop: tree.FORMAT, conversations}, null, 1));

async function erase(chosen) {
  $("erase-dialog").querySelector("b").textContent = tree.titleOf(chosen);
  if (await closedWith($("erase-dialog")) !== "erase") return;
  await library.remove(chosen.id);
  acts.erased(chosen.id);
  await list();
}

async function importFiles() {
  try {
    for (const file of $("import").files) for (const each of tree.imported(await file.text())) await library.save(each);
    $("found").textContent = "";
    await list();
    announce(say("Imported."));
  } catch (error) {
    $("found").textContent = say("Not imported: {reason}.", {reason: error.message});
  }
  $("import").value = "";
}

// `given`: {isShown(whole), open(whole), latest(whole): the same conversation, with an answer that is coming, erased(id)}.
export function listen(given) {
  acts = given;
  $("search").addEventListener("input", list);
  $("export").addEventListener("click", async () => asFile(`oneloop-${new Date().toISOString().slice(0, 10)}`, await library.all()));
  $("import-button").addEventListener("click", () => $("import").click());
  $("import").addEventListener("change", importFiles);
}
