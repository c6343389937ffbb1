// One answer, streamed into a node of the conversation. What it took is measured here, where the reader sits.

import {ask, events, ServerError} from "./server.js";

// Adds to `node` what comes, and calls `changed` after each piece. Throws ServerError, AbortError, TypeError.
export async function stream(node, body, signal, changed) {
  const began = performance.now();
  let first = null, last = began;
  const response = await ask("v1/chat/completions", {body: {...body, stream: true, stream_options: {include_usage: true}}, signal});
  const ignored = response.headers.get("X-Ignored-Fields");
  if (ignored) node.note = `The model or the server does nothing with: ${ignored}.`;
  try {
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(response.status, event.error.message, event.error.code);
      node.model ??= event.model;
      if (event.usage) node.stats = {...node.stats, prompt: event.usage.prompt_tokens, tokens: event.usage.completion_tokens, cached: event.usage.prompt_tokens_details?.cached_tokens ?? 0};
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
    if (first !== null) node.stats = {...node.stats, ttft: first - began, rest: last - first};
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
  const words = [];
  if (prompt !== undefined) words.push(`${prompt} tokens in${cached ? ` (${cached} cached)` : ""}, ${tokens} out`);
  else if (pieces) words.push(`about ${pieces} tokens`);
  const count = tokens ?? pieces;
  if (count > 1 && rest > 0) words.push(`${perSecond((count - 1) / rest * 1000)} tokens/s`);
  if (ttft !== undefined) words.push(`first token after ${ttft < 10000 ? `${Math.round(ttft)} ms` : `${(ttft / 1000).toFixed(1)} s`}`);
  return words.join(" · ");
}

const perSecond = rate => rate < 20 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
