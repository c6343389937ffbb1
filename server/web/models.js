// The models that the server answers with, and which of them is asked: chosen where there are several, kept in this browser.

import {$, el} from "./dom.js";
import {json} from "./server.js";

const KEPT = "oneloop.model";
let names = [], listed = [];

// Fields of a request: none where there is nothing to choose.
export const fields = () => names.length > 1 ? {model: $("models").value} : {};
export const areSeveral = () => names.length > 1;
// Whether the one that is asked reads pictures, or may do so, since nobody knows it yet.
export const sees = () => { const card = listed.find(each => each.id === $("models").value); return card?.modalities === null || Boolean(card?.modalities?.includes("image")); };

// Asks the server again. Of a model that has several names one is shown; one that nobody knows yet, since it was never loaded, may chat.
export async function refresh() {
  const {data} = await json("v1/models");
  const all = data.filter(each => (each.id === each.root || each.parent) && (!each.tasks || each.tasks.includes("generate")));
  if (!all.length) all.push(data[0]);
  const picker = $("models"), wanted = picker.value || localStorage.getItem(KEPT);
  names = all.map(each => each.id);
  listed = all;
  picker.replaceChildren(...all.map(each => el("option", {value: each.id}, `${each.id}${standing(each)}`)));
  picker.value = names.includes(wanted) ? wanted : names[0];
  picker.hidden = names.length < 2;
  $("model").hidden = names.length > 1;
  $("model").textContent = names[0];
  const length = all.find(each => each.id === picker.value).max_model_len;
  $("model").title = picker.title = length ? `${length.toLocaleString("en")} tokens of context` : "";
}

const standing = ({status: {value, failed}}) => failed ? " (cannot be loaded)" : value === "loading" ? " (loading)" : value === "unloaded" ? " (loaded on demand)" : "";

export function keep() { localStorage.setItem(KEPT, $("models").value); }
