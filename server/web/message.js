// One message on the page: what was written, what can be done with it, and what it took. It knows its node and no conversation: whoever
// shows it says what the buttons do.

import {button, copy, el} from "./dom.js";
import {codeBlock, Markdown} from "./markdown.js";
import {statsInWords} from "./answer.js";

const NAMES = {user: "You", assistant: "Model", tool: "Result of a tool"};
const ENDS = {length: "Cut off at the limit of tokens.", tool_calls: "", stop: "", abort: "The server ended it."};

// `acts`: {edit(text), again(), choose(offset), score(), namesModel(), result(call, text), answered(call)}; `position`: [place, count] among its siblings.
export class Message {
  constructor(node, position, acts) {
    this.node = node;
    this.acts = acts;
    this.element = el("article", {class: `message ${node.role}`, "aria-label": `${NAMES[node.role]}`, "data-node": node.id});
    this.body = el("div", {class: "body"});
    this.foot = el("div", {class: "foot"});
    this.element.append(el("h2", {class: "hidden-label"}, NAMES[node.role]), this.body, this.foot);
    if (node.role === "assistant") this.buildAnswer();
    else this.showOwn();
    this.position = position;
    this.update(false);
  }

  showOwn() {
    const {content, pictures = []} = this.node;
    this.body.replaceChildren(...pictures.map((url, at) => el("img", {class: "picture", src: url, alt: `Picture ${at + 1}`})), ...(content ? [el("div", {class: "own"}, content)] : []));
  }

  buildAnswer() {
    this.thoughts = el("div", {class: "thoughts"});
    this.thinking = el("details", {class: "reasoning", hidden: true}, el("summary", null, "Reasoning"), this.thoughts);
    this.text = el("div", {class: "markdown"});
    this.calls = el("div", {class: "calls"});
    this.waits = el("span", {class: "waits", role: "img", "aria-label": "The model is at work"}, el("i"), el("i"), el("i"));
    this.markdown = new Markdown(this.text);
    this.body.append(this.thinking, this.text, this.calls, this.waits);
  }

  // Shows what the node has become. `isRunning`: and more may come.
  update(isRunning) {
    const {node} = this;
    if (node.role === "assistant") {
      this.updateReasoning(isRunning);
      if (node.format === "json" && !isRunning && isJson(node.content)) this.text.replaceChildren(codeBlock(JSON.stringify(JSON.parse(node.content), null, 2), "json"));
      else this.markdown.update(node.content);
      this.updateCalls(isRunning);
      this.waits.hidden = !isRunning || Boolean(node.content);
    }
    this.element.setAttribute("aria-busy", String(isRunning));
    this.updateFoot(isRunning);
  }

  updateReasoning(isRunning) {
    const {node, thinking} = this;
    if (!node.reasoning) return;
    if (thinking.hidden) {
      thinking.hidden = false;
      thinking.open = isRunning;
    }
    if (this.thoughts.textContent !== node.reasoning) this.thoughts.textContent = node.reasoning;
    if (node.content && !this.hasAnswered) { // folded once, when the answer begins; who opens it again has it open
      this.hasAnswered = true;
      thinking.open = false;
    }
  }

  updateCalls(isRunning) {
    const {calls = []} = this.node;
    this.calls.replaceChildren(...calls.map(call => el("div", {class: "call"}, el("div", null, "Calls ", el("b", null, call.name)), codeBlock(pretty(call.arguments), "json"), !isRunning && !this.acts.answered(call) ? this.resultForm(call) : null)));
  }

  resultForm(call) {
    const input = el("textarea", {rows: 2, class: "code", "aria-label": `Result of ${call.name}`, placeholder: "What the function returns"});
    return el("div", {class: "result"}, input, button("Send result", () => this.acts.result(call, input.value)));
  }

  updateFoot(isRunning) {
    const {node, acts} = this, [place, count] = this.position;
    const controls = [];
    if (count > 1) controls.push(el("span", {class: "branch", role: "group", "aria-label": `Version ${place + 1} of ${count}`}, button("‹", () => acts.choose(-1), {class: "small plain", "aria-label": "Version before", disabled: place === 0}), el("span", null, `${place + 1}/${count}`), button("›", () => acts.choose(1), {class: "small plain", "aria-label": "Version after", disabled: place === count - 1})));
    if (!isRunning && (node.content || node.error)) {
      if (node.content) { const control = button("Copy", () => copy(node.content, control), {class: "small plain", "aria-label": "Copy message"}); controls.push(control); }
      if (node.role === "user") controls.push(button("Edit", () => this.edit(), {class: "small plain"}));
    }
    if (!isRunning && node.role === "assistant") {
      controls.push(button("Regenerate", () => acts.again(), {class: "small plain", title: "Another answer, beside this one"}));
      if (node.content && node.stats?.prompt) controls.push(button("Heat map", () => this.heat(), {class: "small plain", "aria-pressed": String(Boolean(this.heatBox)), title: "How likely the model finds each token"}));
    }
    const notes = [node.model && acts.namesModel() ? `${node.model}:` : "", isRunning ? "" : statsInWords(node.stats), node.finish ? ENDS[node.finish] ?? node.finish : "", node.stopped ? "Stopped." : "", node.note ?? ""].filter(Boolean);
    const shown = [controls, notes.length ? el("span", {class: "stats"}, notes.join(" ")) : null, node.error ? el("p", {class: "error", role: "alert"}, node.error) : null];
    this.foot.replaceChildren(...shown.flat().filter(Boolean));
  }

  edit() {
    const input = el("textarea", {rows: Math.min(12, this.node.content.split("\n").length + 1), "aria-label": "Edit message"});
    input.value = this.node.content;
    const back = () => { this.showOwn(); this.foot.hidden = false; };
    const send = () => { if (input.value.trim()) this.acts.edit(input.value.trim()); };
    input.addEventListener("keydown", event => {
      if (event.key === "Escape") { event.stopPropagation(); back(); } // or it would close a panel, too
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    this.body.replaceChildren(el("div", {class: "edit"}, input, el("div", {class: "row"}, button("Cancel", back), button("Send", send, {class: "main"}))));
    this.foot.hidden = true;
    input.focus();
  }

  async heat() {
    if (this.heatBox) {
      this.heatBox.remove();
      this.heatBox = null;
    } else {
      this.heatBox = el("div", {class: "dim", role: "status"}, "The model scores its answer …");
      this.body.append(this.heatBox);
      const shown = await this.acts.score();
      this.heatBox?.replaceWith(shown);
      this.heatBox = this.heatBox && shown;
    }
    this.text.hidden = Boolean(this.heatBox);
    this.updateFoot(false);
  }
}

const isJson = text => { try { return typeof JSON.parse(text) === "object"; } catch { return false; } };
const pretty = text => isJson(text) ? JSON.stringify(JSON.parse(text), null, 2) : text;
