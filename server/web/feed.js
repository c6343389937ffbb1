// What the server tells, once a second: kept for a minute. Percentiles and rates are made here, of counters and histograms that only grow.

import {ask, events} from "./server.js";
import {language, say, whole} from "./words.js";

export const WINDOW_S = 60;
const NUM_REQUESTS = 400;

// What the server says of itself, and of each of its models.
export class Feed {
  constructor() {
    this.last = null; // {status, has_texts, …}, without the models
    this.models = new Map(); // by name: a Model
    this.unloaded = []; // [{name, status}] of those that have never been loaded
    this.chosen = null; // the name of the one that somebody wants to see
  }

  // The one to be shown: as chosen, or else the first; a Model without samples where there is none.
  get shown() { return this.models.get(this.chosen) ?? this.models.values().next().value ?? new Model(); }

  take({models, unloaded, ...server}) {
    this.last = server;
    this.unloaded = unloaded;
    for (const each of models) {
      if (!this.models.has(each.name)) this.models.set(each.name, new Model());
      this.models.get(each.name).take(each);
    }
    const names = new Set(models.map(each => each.name));
    for (const name of this.models.keys()) if (!names.has(name)) this.models.delete(name); // another server answers now
  }

  // Reads until `signal`. `changed` is called after each snapshot, with its text, `lost` with an error where there is none any more.
  async follow(changed, lost, signal) {
    for (let wait = 500; ; wait = Math.min(8000, 2 * wait)) {
      try {
        for await (const data of events(await ask("dashboard/feed", {signal}))) {
          this.take(JSON.parse(data));
          wait = 250;
          changed(data);
        }
        lost(new Error(say("the server has ended the feed")));
      } catch (error) {
        if (signal.aborted) return;
        lost(error);
        if (error.wantsKey) return; // another try comes with another key
      }
      await new Promise(resolve => setTimeout(resolve, wait));
    }
  }

}

// A minute of what a model does.
export class Model {
  constructor() {
    this.samples = []; // snapshots of the last minute, the oldest first
    this.steps = []; // [number, launched_s, settled_s, prompt tokens, decodes, preempted, captured, idle_s]
    this.requests = new Map(); // by id, those that ended; the latest last
  }

  get last() { return this.samples.at(-1); }

  take(snapshot) {
    const restarted = this.last && snapshot.num_steps < this.last.num_steps;
    if (restarted) Object.assign(this, {samples: [], steps: [], requests: new Map()});
    const known = this.steps.at(-1)?.[0] ?? 0;
    this.steps.push(...(snapshot.steps ?? []).filter(step => step[0] > known));
    for (const record of snapshot.requests ?? []) {
      const request = named(record);
      this.requests.delete(request.id);
      this.requests.set(request.id, request);
    }
    for (const id of this.requests.keys()) if (this.requests.size > NUM_REQUESTS) this.requests.delete(id); else break;
    snapshot.live = (snapshot.live ?? []).map(named);
    this.samples.push(snapshot);
    const oldest = (snapshot.now_s ?? 0) - WINDOW_S;
    while (this.samples.length > 2 && this.samples[0].now_s < oldest) this.samples.shift();
    while (this.steps.length && this.steps[0][2] < oldest) this.steps.shift();
  }

  // Of a counter, a second: over the last `seconds`.
  rate(name, seconds = 3) {
    const [one, last] = this.span(seconds);
    return one && last.now_s > one.now_s ? (number(last, name) - number(one, name)) / (last.now_s - one.now_s) : null;
  }

  // Of each second in the window, for a line.
  rates(name) {
    return this.samples.slice(1).map((sample, at) => [sample.now_s, Math.max(0, (number(sample, name) - number(this.samples[at], name)) / (sample.now_s - this.samples[at].now_s))]);
  }

  values(read) { return this.samples.map(sample => [sample.now_s, read(sample)]); }

  // What `share` of the observations of the last minute are below; null where there were none.
  percentile(name, share) {
    const [one, last] = this.span(WINDOW_S), [before, after] = [one?.metrics?.[name], last?.metrics?.[name]];
    return after ? quantile(after.bounds, after.counts.map((count, at) => count - (before && one !== last ? before.counts[at] : 0)), share) : null;
  }

  span(seconds) {
    const {last} = this;
    return [this.samples.find(sample => sample.now_s >= last.now_s - seconds - 0.5), last];
  }
}

const number = (sample, name) => sample.metrics?.[name] ?? 0;

const FIELDS = ["number", "id", "arrival", "scheduled", "firstToken", "lastToken", "finished", "prompt", "cached", "output", "finish", "events", "delivered", "held"];
const named = record => Object.fromEntries(FIELDS.map((field, at) => [field, record[at]]));

// Within a bucket, as if observations were spread evenly; the last bucket has no end, so its bound is the answer.
export function quantile(bounds, counts, share) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let left = share * total;
  for (let at = 0; at < counts.length; at++) {
    if (counts[at] && left <= counts[at]) {
      if (at >= bounds.length) return bounds.at(-1);
      const low = at ? bounds[at - 1] : 0;
      return low + (bounds[at] - low) * left / counts[at];
    }
    left -= counts[at];
  }
  return bounds.at(-1);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.09995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.round(value)} s`;
}

export const count = value => value === null || value === undefined ? "–" : value < 10 && value % 1 ? value.toLocaleString(language, {minimumFractionDigits: 1, maximumFractionDigits: 1}) : whole(value);
export const percent = value => value === null || Number.isNaN(value) ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
