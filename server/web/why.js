// Why a request took as long as it did, in words: from its own times and events, the other requests, and the steps that are known.

import {count, seconds} from "./feed.js";
import {say} from "./words.js";

const NOTABLE = 0.1; // share of the whole below which a part is not worth a sentence
const MAX_NAMES = 3;

// Sentences about `request`, what took longest first. `others`: requests that are known; `steps`: those of the feed; `now`: in its seconds.
export function why(request, others, steps, now) {
  const end = request.delivered ?? now, total = end - request.arrival;
  const parts = [queued(request, others, now), prompted(request, others, steps, now), decoded(request, others, steps, now), ...preempted(request, others, now), deferred(request), held(request)];
  const notable = parts.filter(part => part && part.took >= NOTABLE * total).sort((one, other) => other.took - one.took);
  if (!notable.length) return [say("Nothing stands out: it took {time}.", {time: seconds(total)})];
  return notable.map(part => `${seconds(part.took)}: ${part.words}`);
}

const others = (all, request) => all.filter(each => each.id !== request.id);
// Those that had a row at some time from `from` to `to`.
const running = (all, from, to) => all.filter(each => each.scheduled !== null && each.scheduled < to && (each.finished ?? Infinity) > from);
const names = all => all.length > MAX_NAMES ? say("{names} and {count} more", {names: all.slice(0, MAX_NAMES).map(each => each.id).join(", "), count: all.length - MAX_NAMES}) : all.map(each => each.id).join(", ");

function queued(request, all, now) {
  const until = request.scheduled ?? request.finished ?? now, took = until - request.arrival;
  const before = others(all, request), ran = running(before, request.arrival, until);
  const waited = before.filter(each => each.arrival <= request.arrival && (each.scheduled ?? each.finished ?? Infinity) > request.arrival);
  if (waited.length) return {took, words: say("queued behind {count} that came first ({names})", {count: waited.length, names: names(waited)})};
  if (ran.length) return {took, words: say("queued while {count} ran ({names})", {count: ran.length, names: names(ran)})};
  return {took, words: say("queued, and no other request is known that ran meanwhile")};
}

function prompted(request, all, steps, now) {
  if (request.scheduled === null) return null;
  const until = request.firstToken ?? request.finished ?? now, took = until - request.scheduled;
  const chunks = request.events.filter(([kind, at]) => kind === "chunk" && at <= until), own = chunks.reduce((sum, [, , tokens]) => sum + tokens, 0);
  const words = [say("its prompt: {count} tokens computed (chunks: {chunks}), {cached} found in the cache", {count: count(own || request.prompt - request.cached), chunks: Math.max(1, chunks.length), cached: count(request.cached)})];
  const beside = within(steps, request.scheduled, until).reduce((sum, {step}) => sum + step[3], 0) - own;
  if (own && beside > own / 2) words.push(say("prompt tokens of others beside it: {count}", {count: count(beside)}));
  return {took, words: [...words, ...longest(steps, request.scheduled, until)].join("; ")};
}

function decoded(request, all, steps, now) {
  if (request.firstToken === null) return null;
  const until = request.lastToken ?? request.finished ?? now, took = until - request.firstToken, ran = running(others(all, request), request.firstToken, until);
  const words = [request.output > 1 ? say("{count} tokens, {time} each", {count: count(request.output), time: seconds(took / (request.output - 1))}) : say("{count} tokens", {count: count(request.output)})];
  if (ran.length) words.push(say("other requests beside it: {count}", {count: count(ran.length)}));
  return {took, words: [...words, ...longest(steps, request.firstToken, until)].join("; ")};
}

// Each time that its blocks went to others, until it went on.
function preempted(request, all, now) {
  return request.events.flatMap(([kind, at], index) => {
    if (kind !== "preempted") return [];
    const until = request.events.slice(index).find(([each]) => each === "resumed")?.[1] ?? request.finished ?? now;
    const ran = others(all, request).filter(each => running([each], at, at).length);
    return [{took: until - at, words: ran.length ? say("preempted: its KV blocks went to those that ran ({names})", {names: names(ran)}) : say("preempted: the KV cache was full")}];
  });
}

// A step whose mask was late leaves its row out until the next.
function deferred(request) {
  const late = request.events.filter(([kind]) => kind === "deferred");
  if (!late.length) return null;
  const took = late.reduce((sum, [, at]) => sum + Math.max(0, (request.events.find(([, after]) => after > at)?.[1] ?? request.lastToken ?? at) - at), 0);
  return {took, words: say("the mask of its grammar was late (times: {count})", {count: late.length})};
}

const held = request => request.delivered === null ? null : {took: request.held, words: say("what had settled waited for a reader that was busy")};

// What a step did alone: it is launched while the one before it still runs.
const spans = steps => steps.map((step, at) => ({step, from: Math.max(step[1], steps[at - 1]?.[2] ?? 0), to: step[2]}));
const within = (steps, from, to) => spans(steps).filter(span => span.from < to && span.to > from);

// The longest step of that time, where one took much of it.
function longest(steps, from, to) {
  const lengths = within(steps, from, to).map(({step, from: began, to: ended}) => [Math.min(ended, to) - Math.max(began, from), ended - began, step]);
  const [inside, took, step] = lengths.reduce((best, each) => each[0] > best[0] ? each : best, [0]);
  if (!step || inside < NOTABLE * (to - from)) return [];
  return [say("its longest step, {number}, took {time} (prompt tokens: {prompts}, decodes: {decodes})", {number: count(step[0]), time: seconds(took), prompts: count(step[3]), decodes: count(step[4])})];
}
