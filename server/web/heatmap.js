// How likely the model finds each token of an answer: it is asked on demand, by scoring the conversation up to the answer's end.

import {el} from "./dom.js";
import {json} from "./server.js";
import {say} from "./words.js";

const ALTERNATIVES = 5;

// Tokens of the answer that ends `messages`: [{text, logprob, rank, others: [[text, logprob]]}]. `promptTokens`: how many come before it; `model`: whose it is.
export async function score(messages, promptTokens, model) {
  const body = {messages, model, continue_final_message: true, add_generation_prompt: false, max_tokens: 0, prompt_logprobs: ALTERNATIVES, return_token_ids: true};
  const answer = await json("v1/chat/completions", {body});
  const ids = answer.choices[0].prompt_token_ids;
  return ids.map((id, index) => [answer.prompt_logprobs[index], id]).slice(Math.max(1, promptTokens)).map(([entry, id]) => token(entry, id));
}

function token(entry, id) {
  const shown = ({decoded_token: text, logprob, rank}) => ({text, logprob, rank});
  const others = Object.values(entry).filter(each => each.rank <= ALTERNATIVES).sort((one, other) => one.rank - other.rank);
  return {...shown(entry[id]), others: others.map(each => [each.decoded_token, each.logprob])};
}

const percent = logprob => { const share = 100 * Math.exp(logprob); return `${share < 0.1 ? share.toExponential(0) : share.toFixed(1)} %`; };
const visible = text => text.replace(/ /g, "␣").replace(/\n/g, "↵") || "∅";

// One element a token: the redder, the less likely. The one under pointer or focus is explained below.
export function heatmap(tokens) {
  const about = el("p", {class: "heat-about dim", role: "status"}, say("Point at a token, or move with the arrow keys: the redder, the less likely the model found it."));
  const explain = each => about.replaceChildren(el("b", null, visible(each.text)), ` ${percent(each.logprob)}, ${say("rank {rank}. Most likely:", {rank: each.rank})} `, ...each.others.map(([text, logprob]) => el("span", {class: "other"}, el("code", null, visible(text)), ` ${percent(logprob)}`)));
  const spans = tokens.map((each, index) => {
    const span = el("span", {class: `heat heat-${heat(each.logprob)}`, tabindex: index ? "-1" : "0", "aria-label": `${visible(each.text)}, ${percent(each.logprob)}`, role: "option"}, each.text);
    span.addEventListener("pointerenter", () => explain(each));
    span.addEventListener("focus", () => explain(each));
    return span;
  });
  const box = el("div", {class: "heat-tokens", role: "listbox", "aria-label": say("Tokens of the answer")}, spans);
  box.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], at = spans.indexOf(document.activeElement);
    if (!step || !spans[at + step]) return;
    event.preventDefault();
    spans[at].tabIndex = -1;
    spans[at + step].tabIndex = 0;
    spans[at + step].focus();
  });
  const mean = tokens.reduce((sum, each) => sum + each.logprob, 0) / Math.max(1, tokens.length);
  return el("div", {class: "heatmap"}, box, about, el("p", {class: "dim"}, say("{count} tokens, perplexity {value}", {count: tokens.length, value: Math.exp(-mean).toFixed(2)})));
}

// 0 (certain) to 8: equal steps of the logarithm, down to 1 in 3000.
const heat = logprob => Math.min(8, Math.max(0, Math.round(-logprob)));
