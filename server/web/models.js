// The models that the server answers with, and which of them is asked: chosen where there are several, kept in this browser.

import {$, el} from "./dom.js";
import {json} from "./server.js";
import {say, whole} from "./words.js";

const KEPT = "oneloop.model";
let names = [], listed = [], writer = null;

const asked = () => listed.find(each => each.id === $("models").value);

// Fields of a request: none where there is nothing to choose. `name`: of another model than the chosen one.
export const fields = name => names.length > 1 ? {model: names.includes(name) ? name : $("models").value} : {};
export const areSeveral = () => names.length > 1;
export const all = () => names;
// Whether the one that is asked takes "image" or "audio", or may do so, since nobody knows it yet.
export const takes = modality => asked()?.modalities === null || Boolean(asked()?.modalities?.includes(modality));
// Tokens of its context; null where nobody knows.
export const length = () => asked()?.max_model_len ?? null;
// The name of a model that writes down speech (`/v1/audio/transcriptions`); null where there is none.
export const transcriber = () => writer;

// Asks the server again. Of a model that has several names one is shown; one that nobody knows yet, since it was never loaded, may chat.
export async function refresh() {
  const {data} = await json("v1/models");
  const found = data.filter(each => (each.id === each.root || each.parent) && (!each.tasks || each.tasks.includes("generate")));
  writer = data.find(each => each.tasks?.includes("transcribe"))?.id ?? null;
  if (!found.length) found.push(data[0]);
  const picker = $("models"), wanted = picker.value || localStorage.getItem(KEPT);
  names = found.map(each => each.id);
  listed = found;
  picker.replaceChildren(...found.map(each => el("option", {value: each.id}, `${each.id}${standing(each)}`)));
  picker.value = names.includes(wanted) ? wanted : names[0];
  picker.hidden = names.length < 2;
  $("model").hidden = names.length > 1;
  $("model").textContent = names[0];
  $("model").title = picker.title = length() ? say("{count} tokens of context", {count: whole(length())}) : "";
}

const standing = ({status: {value, failed}}) => failed ? ` (${say("cannot be loaded")})` : value === "loading" ? ` (${say("loading")})` : value === "unloaded" ? ` (${say("loaded on demand")})` : "";

export function keep() { localStorage.setItem(KEPT, $("models").value); }
