// One answer, streamed into a node of the conversation. What it took is measured here, where the reader sits.

import {ask, events, ServerError} from "./server.js";
import {language, say, whole} from "./words.js";

// Adds to `node` what comes, also to what it has where it goes on, and calls `changed` after each piece. Throws ServerError, AbortError, TypeError.
export async function stream(node, body, signal, changed) {
  const began = performance.now(), goesOn = Boolean(node.content), {tokens: earlier = node.stats?.pieces ?? 0, ...before} = node.stats ?? {};
  let first = null, last = began;
  const response = await ask("v1/chat/completions", {body: {...body, stream: true, stream_options: {include_usage: true}}, signal});
  const ignored = response.headers.get("X-Ignored-Fields");
  if (ignored) node.note = say("The model or the server does nothing with: {fields}.", {fields: ignored});
  try {
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(response.status, event.error.message, event.error.code);
      node.model ??= event.model;
      if (event.usage) node.stats = {...node.stats, tokens: earlier + event.usage.completion_tokens, ...(goesOn ? {} : {prompt: event.usage.prompt_tokens, cached: event.usage.prompt_tokens_details?.cached_tokens ?? 0})};
      const choice = event.choices[0];
      if (!choice) continue;
      if (choice.finish_reason) node.finish = choice.finish_reason;
      if (take(node, choice.delta ?? {})) {
        last = performance.now();
        first ??= last;
        node.stats = {...node.stats, pieces: (node.stats?.pieces ?? 0) + 1};
      }
      changed();
    }
  } finally {
    if (first !== null) node.stats = {...node.stats, ttft: before.ttft ?? first - began, rest: (before.rest ?? 0) + last - first};
  }
}

// Whether anything of the answer came.
function take(node, delta) {
  const reasoning = delta.reasoning ?? delta.reasoning_content;
  if (reasoning) node.reasoning = (node.reasoning ?? "") + reasoning;
  if (delta.content) node.content += delta.content;
  for (const part of delta.tool_calls ?? []) {
    node.calls ??= [];
    const call = node.calls[part.index] ??= {id: part.id ?? "", name: "", arguments: ""};
    if (part.id) call.id = part.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  return Boolean(reasoning || delta.content || delta.tool_calls?.length);
}

// Tokens, speed and time to the first token, in words; of one that was broken off what is known.
export function statsInWords({prompt, tokens, cached, ttft, rest, pieces} = {}) {
  const words = [], count = tokens ?? pieces;
  if (prompt !== undefined) words.push(cached ? say("{prompt} tokens in ({cached} cached), {tokens} out", {prompt, cached, tokens}) : say("{prompt} tokens in, {tokens} out", {prompt, tokens}));
  else if (pieces) words.push(say("about {count} tokens", {count: pieces}));
  if (count > 1 && rest > 0) words.push(say("{rate} tokens/s", {rate: perSecond((count - 1) / rest * 1000)}));
  if (ttft !== undefined) words.push(say("first token after {time}", {time: ttft < 10000 ? `${Math.round(ttft)} ms` : `${(ttft / 1000).toFixed(1)} s`}));
  return words.join(" · ");
}

const perSecond = rate => rate < 20 ? rate.toLocaleString(language, {minimumFractionDigits: 1, maximumFractionDigits: 1}) : whole(rate);
