// What is asked of the model beside the messages: system prompt, sampling, tools, and the form that an answer must have.
// Kept in this browser. An empty field is not sent: the server's own default holds.

import * as compare from "./compare.js";
import {$, announce, button, el} from "./dom.js";
import * as models from "./models.js";
import * as presets from "./presets.js";
import {json} from "./server.js";
import {languages, say} from "./words.js";

const KEPT = "oneloop.settings";
const NUMBERS = [
  ["temperature", say("Temperature"), {min: 0, max: 2, step: 0.1}], ["top_p", say("Top p"), {min: 0.01, max: 1, step: 0.01}], ["top_k", say("Top k"), {min: 0, step: 1}],
  ["min_p", say("Min p"), {min: 0, max: 1, step: 0.01}], ["max_tokens", say("Max tokens"), {min: 1, step: 1}], ["seed", say("Seed"), {step: 1}],
  ["presence_penalty", say("Presence penalty"), {min: -2, max: 2, step: 0.1}], ["frequency_penalty", say("Frequency penalty"), {min: -2, max: 2, step: 0.1}],
  ["repetition_penalty", say("Repetition penalty"), {min: 0.1, max: 2, step: 0.05}],
];
const FORMS = {
  none: [say("Any text"), ""],
  json_object: [say("A JSON object"), ""],
  json_schema: [say("JSON schema"), '{\n  "type": "object",\n  "properties": {\n    "name": {"type": "string"},\n    "age": {"type": "integer", "minimum": 0},\n    "likes": {"type": "array", "items": {"type": "string"}, "maxItems": 3}\n  },\n  "required": ["name", "age", "likes"]\n}'],
  regex: [say("Regular expression"), "[0-9]{4}-[0-9]{2}-[0-9]{2}"],
  choice: [say("One of these lines"), "yes\nno\nmaybe"],
  grammar: [say("Grammar (Lark or GBNF)"), 'start: sum\nsum: product (("+" | "-") product)*\nproduct: atom (("*" | "/") atom)*\natom: /[0-9]+/ | "(" sum ")"'],
};

const defaults = () => ({system: "", stop: "", thinking: "auto", tools: "", form: "none", texts: {}});
let kept = defaults();
try { kept = {...kept, ...JSON.parse(localStorage.getItem(KEPT))}; } catch { /* not ours, or damaged: defaults */ }

// The settings as they are in the panel, or those of a preset; the functions below read such.
export const current = preset => ({...defaults(), ...(preset && presets.find(preset) || kept)});

// Fields of a request. Throws Error, with what is wrong, for a number out of range, and for text that is to be JSON and is none.
export function fields(kept) {
  const found = {};
  for (const [name, text, {min, max}] of NUMBERS) {
    if (kept[name] === undefined || kept[name] === "") continue;
    const value = found[name] = Number(kept[name]);
    if (value < min || value > max) throw new Error(max === undefined ? say("{name} is {value}. Enter a number of at least {min} in the settings, or leave it empty.", {name: text, value, min}) : say("{name} is {value}. Enter a number from {min} to {max} in the settings, or leave it empty.", {name: text, value, min, max}));
  }
  const stop = kept.stop.split("\n").filter(line => line);
  if (stop.length) found.stop = stop;
  if (kept.thinking !== "auto") found.chat_template_kwargs = {enable_thinking: kept.thinking === "on"};
  if (kept.tools.trim()) found.tools = parsed(kept.tools, say("Tools"));
  return {...found, ...form(kept)};
}

// "json" where the answer will be some.
export const format = kept => ["json_object", "json_schema"].includes(kept.form) ? "json" : null;

function form(kept) {
  const text = kept.texts[kept.form] ?? FORMS[kept.form]?.[1] ?? "";
  switch (kept.form) {
    case "json_object": return {response_format: {type: "json_object"}};
    case "json_schema": return {response_format: {type: "json_schema", json_schema: {name: "answer", schema: parsed(text, say("The JSON schema"))}}};
    case "regex": return {structured_outputs: {regex: text}};
    case "choice": return {structured_outputs: {choice: text.split("\n").filter(line => line)}};
    case "grammar": return {structured_outputs: {grammar: text}};
  }
  return {};
}

function parsed(text, name) {
  try { return JSON.parse(text); } catch (error) { throw new Error(`${name}: ${error.message}`); }
}

// Fills the panel, and keeps what is typed into it.
export function fillPanel(panel) {
  const store = () => localStorage.setItem(KEPT, JSON.stringify(kept));
  const bound = (input, name) => {
    input.id = `set-${name}`;
    input.value = kept[name] ?? "";
    input.addEventListener("input", () => { kept[name] = input.value; store(); });
    return input;
  };
  const labelled = (text, input) => el("div", {class: "field"}, el("label", {for: input.id}, text), input);
  const area = (name, text, rows, attributes) => labelled(text, bound(el("textarea", {rows, ...attributes}), name));
  const numbers = NUMBERS.map(([name, text, limits]) => labelled(text, bound(el("input", {type: "number", placeholder: say("default"), ...limits}), name)));
  const thinking = bound(el("select", null, el("option", {value: "auto"}, say("Model default")), el("option", {value: "on"}, say("On")), el("option", {value: "off"}, say("Off"))), "thinking");

  const kinds = bound(el("select", null, Object.entries(FORMS).map(([name, [text]]) => el("option", {value: name}, text))), "form");
  const text = el("textarea", {id: "set-form-text", class: "code", rows: 9, spellcheck: "false", "aria-label": say("The form itself")});
  const verdict = el("p", {class: "verdict", role: "status"});
  const check = button(say("Check it"), () => checkForm(verdict, check));
  const show = () => {
    text.hidden = check.hidden = kept.form === "none" || kept.form === "json_object";
    text.value = kept.texts[kept.form] ?? FORMS[kept.form][1];
    verdict.textContent = "";
  };
  kinds.addEventListener("input", show);
  text.addEventListener("input", () => { kept.texts[kept.form] = text.value; store(); verdict.textContent = ""; });
  show();

  panel.replaceChildren(
    presetsRow(panel),
    area("system", say("System prompt"), 4),
    el("fieldset", null, el("legend", null, say("Sampling")), el("div", {class: "numbers"}, numbers), area("stop", say("Stop strings, one a line"), 2), labelled(say("Thinking"), thinking)),
    el("fieldset", null, el("legend", null, say("Form of the answer")), labelled(say("The answer is"), kinds), text, el("div", {class: "row"}, check), verdict),
    el("fieldset", null, el("legend", null, say("Tools")), area("tools", say("Functions, as JSON (OpenAI's `tools`)"), 4, {class: "code", spellcheck: "false", placeholder: '[{"type": "function", "function": {"name": "get_weather", "parameters": {…}}}]'})),
    el("div", {class: "row"}, button(say("Back to defaults"), () => { kept = defaults(); store(); fillPanel(panel); $("settings-title").focus(); })),
    languageField(),
  );
}

// Presets: one is chosen and fills the panel; what the panel has is saved under a name.
function presetsRow(panel) {
  const picker = el("select", {id: "preset"}, el("option", {value: ""}, "–"), presets.names().map(name => el("option", {value: name}, name)));
  const name = el("input", {id: "preset-name", placeholder: say("Name"), "aria-label": say("Name of a preset"), maxlength: 80});
  const again = () => { fillPanel(panel); compare.fill(); };
  const save = () => {
    if (!name.value.trim()) return name.focus();
    presets.save(name.value.trim(), kept);
    again();
    $("preset").value = name.value.trim();
    announce(say("Saved."));
  };
  const remove = button(say("Delete"), () => { presets.remove(picker.value); again(); $("preset").focus(); }, {class: "small", disabled: true, "aria-label": say("Delete this preset")});
  picker.addEventListener("input", () => {
    if (!picker.value) return;
    const chosen = picker.value;
    kept = current(chosen);
    localStorage.setItem(KEPT, JSON.stringify(kept));
    fillPanel(panel);
    Object.assign($("preset"), {value: chosen}).focus();
    $("preset-name").value = chosen;
    panel.querySelector(".presets button").disabled = false;
  });
  return el("fieldset", {class: "presets"}, el("legend", null, say("Presets")), el("div", {class: "field"}, el("label", {for: "preset"}, say("Use")), el("div", {class: "line"}, picker, remove)), el("div", {class: "line"}, name, button(say("Save"), save, {class: "small", "aria-label": say("Save as a preset")})));
}

function languageField() {
  const picker = el("select", {id: "language"}, languages.all.map(([value, name]) => el("option", {value}, name)));
  picker.value = languages.chosen;
  picker.addEventListener("input", () => languages.choose(picker.value));
  return el("div", {class: "field"}, el("label", {for: "language"}, say("Language")), picker);
}

// Asks the server for one token of such an answer: it compiles the form, or says what is wrong with it.
async function checkForm(verdict, control) {
  control.disabled = true;
  verdict.className = "verdict dim";
  verdict.textContent = say("The server reads it …");
  try {
    await json("v1/chat/completions", {body: {messages: [{role: "user", content: "."}], max_tokens: 1, ...form(kept), ...models.fields()}});
    verdict.className = "verdict good";
    verdict.textContent = say("The server takes it.");
  } catch (error) {
    verdict.className = "verdict error";
    verdict.textContent = error.message;
  }
  control.disabled = false;
}
