// What is asked of the model beside the messages: system prompt, sampling, tools, and the form that an answer must have.
// Kept in this browser. An empty field is not sent: the server's own default holds.

import {$, button, el} from "./dom.js";
import * as models from "./models.js";
import {json} from "./server.js";

const KEPT = "oneloop.settings";
const NUMBERS = [
  ["temperature", "Temperature", {min: 0, max: 2, step: 0.1}], ["top_p", "Top p", {min: 0.01, max: 1, step: 0.01}], ["top_k", "Top k", {min: 0, step: 1}],
  ["min_p", "Min p", {min: 0, max: 1, step: 0.01}], ["max_tokens", "Max tokens", {min: 1, step: 1}], ["seed", "Seed", {step: 1}],
  ["presence_penalty", "Presence penalty", {min: -2, max: 2, step: 0.1}], ["frequency_penalty", "Frequency penalty", {min: -2, max: 2, step: 0.1}],
  ["repetition_penalty", "Repetition penalty", {min: 0.1, max: 2, step: 0.05}],
];
const FORMS = {
  none: ["Any text", ""],
  json_object: ["A JSON object", ""],
  json_schema: ["JSON schema", '{\n  "type": "object",\n  "properties": {\n    "name": {"type": "string"},\n    "age": {"type": "integer", "minimum": 0},\n    "likes": {"type": "array", "items": {"type": "string"}, "maxItems": 3}\n  },\n  "required": ["name", "age", "likes"]\n}'],
  regex: ["Regular expression", "[0-9]{4}-[0-9]{2}-[0-9]{2}"],
  choice: ["One of these lines", "yes\nno\nmaybe"],
  grammar: ["Grammar (Lark or GBNF)", 'start: sum\nsum: product (("+" | "-") product)*\nproduct: atom (("*" | "/") atom)*\natom: /[0-9]+/ | "(" sum ")"'],
};

const defaults = () => ({system: "", stop: "", thinking: "auto", tools: "", form: "none", texts: {}});
let kept = defaults();
try { kept = {...kept, ...JSON.parse(localStorage.getItem(KEPT))}; } catch { /* not ours, or damaged: defaults */ }

export const system = () => kept.system;

// Fields of a request. Throws Error, with what is wrong, for a number out of range, and for text that is to be JSON and is none.
export function fields() {
  const found = {};
  for (const [name, text, {min, max}] of NUMBERS) {
    if (kept[name] === undefined || kept[name] === "") continue;
    const value = found[name] = Number(kept[name]);
    if (value < min || value > max) throw new Error(`${text} is ${value}. Enter a number ${max === undefined ? `of at least ${min}` : `from ${min} to ${max}`} in the settings, or leave it empty.`);
  }
  const stop = kept.stop.split("\n").filter(line => line);
  if (stop.length) found.stop = stop;
  if (kept.thinking !== "auto") found.chat_template_kwargs = {enable_thinking: kept.thinking === "on"};
  if (kept.tools.trim()) found.tools = parsed(kept.tools, "Tools");
  return {...found, ...form()};
}

// "json" where the answer will be some.
export const format = () => ["json_object", "json_schema"].includes(kept.form) ? "json" : null;

function form() {
  const text = kept.texts[kept.form] ?? FORMS[kept.form]?.[1] ?? "";
  switch (kept.form) {
    case "json_object": return {response_format: {type: "json_object"}};
    case "json_schema": return {response_format: {type: "json_schema", json_schema: {name: "answer", schema: parsed(text, "The JSON schema")}}};
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
    input.value = kept[name] ?? "";
    input.addEventListener("input", () => { kept[name] = input.value; store(); });
    return input;
  };
  const labelled = (text, input, more) => { input.id ||= `set-${text.toLowerCase().replace(/\W+/g, "-")}`; return el("div", {class: "field"}, el("label", {for: input.id}, text), input, more); };
  const area = (name, text, rows, attributes) => labelled(text, bound(el("textarea", {rows, ...attributes}), name));
  const numbers = NUMBERS.map(([name, text, limits]) => labelled(text, bound(el("input", {type: "number", placeholder: "default", ...limits}), name)));
  const thinking = bound(el("select", null, el("option", {value: "auto"}, "Model default"), el("option", {value: "on"}, "On"), el("option", {value: "off"}, "Off")), "thinking");

  const kinds = bound(el("select", null, Object.entries(FORMS).map(([name, [text]]) => el("option", {value: name}, text))), "form");
  const text = el("textarea", {id: "set-form-text", class: "code", rows: 9, spellcheck: "false", "aria-label": "The form itself"});
  const verdict = el("p", {class: "verdict", role: "status"});
  const check = button("Check it", () => checkForm(verdict, check));
  const show = () => {
    text.hidden = check.hidden = kept.form === "none" || kept.form === "json_object";
    text.value = kept.texts[kept.form] ?? FORMS[kept.form][1];
    verdict.textContent = "";
  };
  kinds.addEventListener("input", show);
  text.addEventListener("input", () => { kept.texts[kept.form] = text.value; store(); verdict.textContent = ""; });
  show();

  panel.replaceChildren(
    area("system", "System prompt", 4),
    el("fieldset", null, el("legend", null, "Sampling"), el("div", {class: "numbers"}, numbers), area("stop", "Stop strings, one a line", 2), labelled("Thinking", thinking)),
    el("fieldset", null, el("legend", null, "Form of the answer"), labelled("The answer is", kinds), text, el("div", {class: "row"}, check), verdict),
    el("fieldset", null, el("legend", null, "Tools"), area("tools", "Functions, as JSON (OpenAI's `tools`)", 4, {class: "code", spellcheck: "false", placeholder: '[{"type": "function", "function": {"name": "get_weather", "parameters": {…}}}]'})),
    el("div", {class: "row"}, button("Back to defaults", () => { kept = defaults(); store(); fillPanel(panel); $("settings-title").focus(); })),
  );
}

// Asks the server for one token of such an answer: it compiles the form, or says what is wrong with it.
async function checkForm(verdict, control) {
  control.disabled = true;
  verdict.className = "verdict dim";
  verdict.textContent = "The server reads it …";
  try {
    await json("v1/chat/completions", {body: {messages: [{role: "user", content: "."}], max_tokens: 1, ...form(), ...models.fields()}});
    verdict.className = "verdict good";
    verdict.textContent = "The server takes it.";
  } catch (error) {
    verdict.className = "verdict error";
    verdict.textContent = error.message;
  }
  control.disabled = false;
}
