// The life of each recent request: a line in a table, and one in full.

import {$, button, el, svg} from "./dom.js";
import {count, seconds} from "./feed.js";
import {json} from "./server.js";
import {why} from "./why.js";
import {say} from "./words.js";

const SHOWN = 100;
const STATES = {waiting: say("waiting"), running: say("running"), streaming: say("streaming"), stop: say("stop"), length: say("length"), abort: say("abort"), error: say("error"), timeout: say("timeout")};
const PHASES = [["queued", "arrival", say("Queued")], ["prefill", "scheduled", say("Prompt")], ["decoding", "firstToken", say("Decode")], ["ending", "lastToken", say("End")], ["streaming", "finished", say("Stream")]]; // [name, since, words]
const EVENTS = {chunk: say("Chunk launched"), preempted: say("Preempted: its KV blocks went to others"), resumed: say("Resumed"), deferred: say("Deferred: its mask was late")};

export class Inspector {
  constructor(feed) {
    this.feed = feed;
    this.rows = new Map();
    $("request-search").addEventListener("input", () => this.update());
  }

  // [id in the address, or null]
  get chosen() { return decodeURIComponent(/^#requests\/(.+)$/.exec(location.hash)?.[1] ?? "") || null; }

  update() {
    const model = this.feed.shown, now = model.last?.now_s ?? 0, wanted = $("request-search").value.trim();
    const all = [...(model.last?.live ?? []), ...[...model.requests.values()].reverse()];
    const found = all.filter(each => each.id.includes(wanted)).slice(0, SHOWN);
    $("request-count").textContent = say("{count} of {all} requests", {count: found.length, all: all.length});
    const rows = new Map(found.map(each => [each.id, this.row(each, now)]));
    const body = $("requests-body"), elements = [...rows.values()];
    if (elements.length !== body.children.length || elements.some((row, at) => body.children[at] !== row)) body.replaceChildren(...elements);
    this.rows = rows;
    $("no-requests").hidden = found.length > 0;
    this.detail(all.find(each => each.id === this.chosen), all, now);
  }

  // A row of one that has ended stays the element it was.
  row(request, now) {
    const known = this.rows.get(request.id);
    if (known && known.request === request) return known;
    const row = known ?? el("tr");
    const [end, label] = [endOf(request, now), stateOf(request)];
    const cells = [el("td", null, el("span", {class: `state ${label}`}, STATES[label] ?? label)), numeric(count(request.prompt)), numeric(count(request.cached)), numeric(count(request.output)), numeric(seconds(since(request.arrival, request.scheduled))), numeric(seconds(since(request.arrival, request.firstToken))), numeric(perToken(request)), numeric(request.delivered === null ? "–" : seconds(request.held)), numeric(seconds(end - request.arrival)), el("td", {class: "bar"}, life(request, now, 14))];
    const name = known?.firstChild ?? el("th", {scope: "row"}, el("a", {href: `#requests/${encodeURIComponent(request.id)}`}, request.id));
    if (known) while (name.nextSibling) name.nextSibling.remove(); // the link stays where it is: it may have the focus
    else row.append(name);
    row.append(...cells);
    row.request = request;
    return row;
  }

  detail(request, all, now) {
    const box = $("request-detail");
    if (!request) {
      box.hidden = true;
      this.detailed = null;
      return;
    }
    if (this.detailed === request) return;
    this.detailed = request;
    box.hidden = false;
    const at = moment => `+${seconds(moment - request.arrival)}`;
    const phases = phasesOf(request, now).map(([name, from, to, words]) => el("li", null, el("i", {class: `key ${name}`}), `${words}: ${seconds(to - from)}`));
    const marks = request.events.map(([kind, moment, tokens]) => el("tr", null, numeric(at(moment)), el("td", null, el("i", {class: `key ${kind}`}), EVENTS[kind] ?? kind), numeric(tokens ? say("{count} tokens", {count: count(tokens)}) : "")));
    box.replaceChildren(
      el("div", {class: "detail-head"}, el("h3", null, request.id), button(say("Close"), () => { location.hash = "#requests"; $("request-search").focus(); }, {class: "small"})),
      life(request, now, 26), el("ul", {class: "legend"}, phases),
      el("h4", null, say("Why it took so long")), el("ul", {class: "why"}, why(request, all, this.feed.shown.steps, now).map(sentence => el("li", null, sentence))),
      el("p", {class: "dim"}, say("{prompt} prompt tokens, {cached} of them cached; {output} generated; {end}.", {prompt: count(request.prompt), cached: count(request.cached), output: count(request.output), end: request.finish ? say("ended: {reason}", {reason: STATES[request.finish] ?? request.finish}) : say("has not ended")})),
      marks.length ? el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": say("Events")}, el("table", null, el("thead", null, el("tr", null, el("th", {scope: "col", class: "number"}, say("after arrival")), el("th", {scope: "col"}, say("event")), el("th", {scope: "col", class: "number"}, say("of")))), el("tbody", null, marks))) : "",
    );
    if (request.finished !== null && this.feed.last?.has_texts && !this.feed.isRecorded) this.texts(request, box);
  }

  // What it asked and was answered, where the server was started to keep that.
  async texts(request, box) {
    let found;
    try {
      found = await json(`dashboard/texts?id=${encodeURIComponent(request.id)}`);
    } catch (error) {
      found = {error: error.message};
    }
    if (this.detailed !== request) return;
    const text = (title, words) => [el("h4", null, title), el("pre", {class: "text", tabindex: "0", role: "region", "aria-label": title}, words)];
    box.append(...(found.error ? [el("p", {class: "dim"}, found.error)] : [...text(say("Prompt"), found.prompt), ...text(say("Answer"), found.answer)]));
  }
}

const numeric = text => el("td", {class: "number"}, text);
const since = (from, to) => from === null || to === null ? null : to - from;
const perToken = ({firstToken, lastToken, output}) => output > 1 && lastToken > firstToken ? seconds((lastToken - firstToken) / (output - 1)) : "–";

// [name, from, to, in words] of those it has come to; the last goes on while it runs.
function phasesOf(request, now) {
  const begun = PHASES.filter(([, since]) => request[since] !== null && (request.finished !== null || since !== "lastToken"));
  return begun.map(([name, since, words], at) => [name, request[since], at < begun.length - 1 ? request[begun[at + 1][1]] : endOf(request, now), words]);
}

// When it was over: its reader had all of it.
const endOf = (request, now) => request.delivered ?? now;
const stateOf = ({finish, finished, delivered, scheduled}) => finished !== null && delivered === null ? "streaming" : finish ?? (scheduled === null ? "waiting" : "running");

// From arrival to end, as wide as there is room: phases as bars, events as marks.
function life(request, now, height) {
  const end = endOf(request, now), whole = Math.max(1e-6, end - request.arrival), x = moment => Math.min(1000, Math.max(0, (moment - request.arrival) / whole * 1000));
  const phases = phasesOf(request, now);
  const bars = phases.map(([name, from, to]) => svg("rect", {class: name, x: x(from), y: 0, height, width: Math.max(0, x(to) - x(from))}));
  const marks = request.events.map(([kind, moment]) => svg("rect", {class: `mark ${kind}`, x: Math.min(997, x(moment)), y: kind === "chunk" ? height * 0.6 : 0, width: 3, height: kind === "chunk" ? height * 0.4 : height}));
  const words = phases.map(([, from, to, name]) => `${name} ${seconds(to - from)}`).join(", ");
  return svg("svg", {viewBox: `0 0 1000 ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": words, class: "life", height}, bars, marks);
}
