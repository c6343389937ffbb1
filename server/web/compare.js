// Comparing: each question gets a second answer beside the first, by another model or other settings.

import {$, el} from "./dom.js";
import * as models from "./models.js";
import * as presets from "./presets.js";
import {say} from "./words.js";

const KEPT = "oneloop.compare";
let kept = {on: false, model: "", preset: ""};
try { kept = {...kept, ...JSON.parse(localStorage.getItem(KEPT))}; } catch { /* not ours, or damaged */ }

// {model, preset} of the second answer, "" for what is as in the first; null where there is to be none.
export const second = () => kept.on ? kept : null;

// Fills the part of the settings. It is filled again when models or presets are others, unless somebody is at it.
export function fill() {
  if ($("compare-panel").contains(document.activeElement)) return;
  const store = () => localStorage.setItem(KEPT, JSON.stringify(kept));
  const picker = (name, text, none, names) => {
    const input = el("select", {id: `compare-${name}`}, el("option", {value: ""}, none), names.map(each => el("option", {value: each}, each)));
    input.value = names.includes(kept[name]) ? kept[name] : "";
    input.addEventListener("input", () => { kept[name] = input.value; store(); });
    return el("div", {class: "field"}, el("label", {for: input.id}, text), input);
  };
  const on = el("input", {type: "checkbox", id: "compare-on", checked: kept.on});
  const choices = el("div", {class: "choices", hidden: !kept.on},
    models.areSeveral() ? picker("model", say("Model of the second answer"), say("The same"), models.all()) : null,
    picker("preset", say("Settings of the second answer"), say("The same"), presets.names()));
  on.addEventListener("input", () => { kept.on = on.checked; choices.hidden = !kept.on; store(); });
  $("compare-panel").replaceChildren(el("fieldset", null, el("legend", null, say("Compare")), el("label", {class: "check"}, on, ` ${say("Two answers side by side")}`), choices));
}
