// A conversation as a tree: what was edited or asked for again stands beside what it replaces, and one path through it is shown.
// Plain data, as it is kept and exported.

import {isPicture} from "./pictures.js";
import {base64Of, isSound} from "./sounds.js";
import {inPrompt} from "./texts.js";
import {say} from "./words.js";

export const FORMAT = 1;
const ROLES = new Set(["user", "assistant", "tool"]);

export const conversation = () => ({id: newId(), title: "", updated: Date.now(), nodes: {}, roots: [], chosen: {}});

// crypto.randomUUID needs https or localhost; this does not.
const newId = () => [...crypto.getRandomValues(new Uint8Array(16))].map(byte => byte.toString(16).padStart(2, "0")).join("");

const siblingsOf = (whole, node) => node.parent === null ? whole.roots : whole.nodes[node.parent].children;
const chosenAmong = (whole, parent, ids) => whole.nodes[ids.includes(whole.chosen[parent]) ? whole.chosen[parent] : ids.at(-1)];

// The nodes that are shown, from the first on.
export function path(whole) {
  const found = [];
  for (let [parent, ids] = ["", whole.roots]; ids.length;) {
    const node = chosenAmong(whole, parent, ids);
    found.push(node);
    [parent, ids] = [node.id, node.children];
  }
  return found;
}

// `fields` of a new node behind `parent` (null: at the beginning); it is shown.
export function add(whole, parent, fields) {
  const node = {id: newId(), parent, children: [], created: Date.now(), ...fields};
  whole.nodes[node.id] = node;
  siblingsOf(whole, node).push(node.id);
  whole.chosen[parent ?? ""] = node.id;
  whole.updated = Date.now();
  return node;
}

export function remove(whole, node) {
  for (const child of [...node.children]) remove(whole, whole.nodes[child]);
  const siblings = siblingsOf(whole, node);
  siblings.splice(siblings.indexOf(node.id), 1);
  delete whole.nodes[node.id];
  delete whole.chosen[node.id];
}

// [its place, how many there are] of a node among those that stand in its place.
export function place(whole, node) {
  const siblings = siblingsOf(whole, node);
  return [siblings.indexOf(node.id), siblings.length];
}

export function choose(whole, node, offset) {
  const siblings = siblingsOf(whole, node), wanted = siblings[siblings.indexOf(node.id) + offset];
  if (wanted) prefer(whole, whole.nodes[wanted]);
}

// As the server takes them. A model's reasoning is not sent back; nor is what was broken off before a word of an answer.
export function messages(nodes, system) {
  const found = system.trim() ? [{role: "system", content: system}] : [];
  for (const node of nodes) {
    if (node.role === "tool") found.push({role: "tool", tool_call_id: node.callId, content: node.content});
    else if (node.role === "user") found.push({role: "user", content: contentOf(node)});
    else if (node.content || node.calls?.length) found.push({role: "assistant", content: node.content, ...(node.calls?.length ? {tool_calls: node.calls.map(call => ({id: call.id, type: "function", function: {name: call.name, arguments: call.arguments}}))} : {})});
  }
  return found;
}

// A text, or parts where pictures or sounds come with it. Files of text are written before what was typed.
function contentOf({content, pictures = [], sounds = [], texts = []}) {
  const text = [...texts.map(inPrompt), content].filter(Boolean).join("\n\n");
  if (!pictures.length && !sounds.length) return text;
  return [
    ...pictures.map(url => ({type: "image_url", image_url: {url}})),
    ...sounds.map(({url}) => ({type: "input_audio", input_audio: {data: base64Of(url), format: "wav"}})),
    ...(text ? [{type: "text", text}] : []),
  ];
}

export function titleOf(whole) {
  if (whole.title) return whole.title;
  const first = whole.nodes[whole.roots[0]], line = first?.content.trim().split("\n")[0] ?? "";
  if (line) return line.length > 60 ? `${line.slice(0, 58)}…` : line;
  if (first?.pictures) return say("A picture");
  return first?.texts?.[0].name ?? first?.sounds?.[0].name ?? say("New chat");
}

// The path that is shown, to be read by people elsewhere.
export function asMarkdown(whole) {
  const parts = path(whole).map(({role, content, model, texts = []}) => `## ${role === "assistant" ? model ?? say("Model") : role === "user" ? say("You") : say("Result of a tool")}\n\n${[...texts.map(inPrompt), content].filter(Boolean).join("\n\n")}`);
  return `${[`# ${titleOf(whole)}`, ...parts].join("\n\n")}\n`;
}

// The nodes that answer beside `node`, itself among them; it alone where there was one answer.
export const beside = (whole, node) => node.pair ? siblingsOf(whole, node).map(id => whole.nodes[id]).filter(each => each.pair === node.pair) : [node];

// Shows `node` in place of what stands where it does.
export function prefer(whole, node) { whole.chosen[node.parent ?? ""] = node.id; }

// Whether any message has `words` in it.
export const holds = (whole, words) => [titleOf(whole), whole.folder ?? "", ...Object.values(whole.nodes).flatMap(node => [node.content, ...(node.texts ?? []).map(each => each.name)])].some(text => text.toLowerCase().includes(words));

// What a file brings, checked field by field: it comes from anywhere. Throws Error.
export function imported(text) {
  let read;
  try { read = JSON.parse(text); } catch { throw new Error(say("the file is not JSON")); }
  if (read?.oneloop !== FORMAT || !Array.isArray(read.conversations)) throw new Error(say("the file holds no conversations of this page"));
  return read.conversations.map(checked);
}

function checked(read) {
  const whole = conversation(), bad = () => { throw new Error(say("a conversation in the file is damaged")); };
  const string = value => typeof value === "string" ? value : bad();
  whole.title = string(read.title ?? "");
  if (read.folder) whole.folder = string(read.folder);
  if (read.pinned) whole.pinned = true;
  whole.updated = Number.isFinite(read.updated) ? read.updated : whole.updated;
  const add = (id, parent, depth) => {
    const from = Object.hasOwn(read.nodes ?? bad(), id) ? read.nodes[id] : bad();
    if (!ROLES.has(from.role) || depth > 5000 || Object.hasOwn(whole.nodes, id)) bad();
    const node = {id: string(id), parent, children: [], created: Number(from.created) || 0, role: from.role, content: string(from.content)};
    for (const name of ["reasoning", "callId", "model", "finish", "error", "format", "pair", "preset"]) if (from[name] !== undefined && from[name] !== null) node[name] = string(from[name]);
    if (from.pictures) node.pictures = from.pictures.map(each => isPicture(each) ? each : bad());
    if (from.sounds) node.sounds = from.sounds.map(each => ({name: string(each.name), url: isSound(each.url) ? each.url : bad()}));
    if (from.texts) node.texts = from.texts.map(each => ({name: string(each.name), size: Number(each.size) || 0, text: string(each.text), cut: Boolean(each.cut)}));
    if (from.calls) node.calls = from.calls.map(call => ({id: string(call.id), name: string(call.name), arguments: string(call.arguments)}));
    if (from.stats) node.stats = Object.fromEntries(Object.entries(from.stats).filter(([, value]) => Number.isFinite(value)));
    whole.nodes[id] = node;
    for (const child of Array.isArray(from.children) ? from.children : bad()) { node.children.push(child); add(child, id, depth + 1); }
  };
  for (const root of Array.isArray(read.roots) ? read.roots : bad()) { whole.roots.push(root); add(root, null, 0); }
  for (const [parent, child] of Object.entries(read.chosen ?? {})) if (Object.hasOwn(whole.nodes, child)) whole.chosen[parent] = child;
  return whole;
}
