// One message on the page: what was written, what can be done with it, and what it took. It knows its node and no conversation: whoever
// shows it says what the buttons do.

import {button, copy, el} from "./dom.js";
import {codeBlock, Markdown} from "./markdown.js";
import {statsInWords} from "./answer.js";
import {aboutText} from "./texts.js";
import {say} from "./words.js";

const NAMES = {user: say("You"), assistant: say("Model"), tool: say("Result of a tool")};
const ENDS = {length: say("Cut off at the limit of tokens."), tool_calls: "", stop: "", abort: say("The server ended it.")};

// `acts`: {edit(text), again(), choose(offset), score(), namesModel(), result(call, text), answered(call)}, and where they are possible goOn() and
// prefer(); `position`: [place, count] among its siblings.
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
    const {content, pictures = [], sounds = [], texts = []} = this.node;
    this.body.replaceChildren(
      ...pictures.map((url, at) => el("img", {class: "picture", src: url, alt: say("Picture {number}", {number: at + 1})})),
      ...sounds.map(({name}) => el("p", {class: "chip"}, el("b", null, name), ` ${say("sound")}`)),
      ...texts.map(each => el("details", {class: "chip"}, el("summary", null, el("b", null, each.name), ` ${aboutText(each)}`), el("pre", {tabindex: "0", "aria-label": each.name}, each.text))),
      ...(content ? [el("div", {class: "own"}, content)] : []),
    );
  }

  buildAnswer() {
    this.thoughts = el("div", {class: "thoughts"});
    this.thinking = el("details", {class: "reasoning", hidden: true}, el("summary", null, say("Reasoning")), this.thoughts);
    this.text = el("div", {class: "markdown"});
    this.calls = el("div", {class: "calls"});
    this.waits = el("span", {class: "waits", role: "img", "aria-label": say("The model is at work")}, el("i"), el("i"), el("i"));
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
    this.calls.replaceChildren(...calls.map(call => el("div", {class: "call"}, el("div", null, `${say("Calls")} `, el("b", null, call.name)), codeBlock(pretty(call.arguments), "json"), !isRunning && !this.acts.answered(call) ? this.resultForm(call) : null)));
  }

  resultForm(call) {
    const input = el("textarea", {rows: 2, class: "code", "aria-label": say("Result of {name}", {name: call.name}), placeholder: say("What the function returns")});
    return el("div", {class: "result"}, input, button(say("Send result"), () => this.acts.result(call, input.value)));
  }

  updateFoot(isRunning) {
    const {node, acts} = this, notes = [acts.namesModel() && node.model ? `${node.model}:` : "", node.preset ? `${node.preset}:` : "", isRunning ? "" : statsInWords(node.stats), node.finish ? ENDS[node.finish] ?? node.finish : "", node.stopped ? say("Stopped.") : "", node.note ?? ""].filter(Boolean);
    const shown = [this.branches(), ...(isRunning ? [] : this.controls()), notes.length ? el("span", {class: "stats"}, notes.join(" ")) : null, node.error ? el("p", {class: "error", role: "alert"}, node.error) : null];
    this.foot.replaceChildren(...shown.filter(Boolean));
  }

  branches() {
    const {acts, position: [place, count]} = this;
    if (count < 2) return null;
    return el("span", {class: "branch", role: "group", "aria-label": say("Version {number} of {count}", {number: place + 1, count})},
      button("‹", () => acts.choose(-1), {class: "small plain", "aria-label": say("Version before"), disabled: place === 0}),
      el("span", null, `${place + 1}/${count}`),
      button("›", () => acts.choose(1), {class: "small plain", "aria-label": say("Version after"), disabled: place === count - 1}));
  }

  controls() {
    const {node, acts} = this, isAnswer = node.role === "assistant", found = [];
    const add = (text, act, attributes) => { const made = button(text, () => act(made), {class: "small plain", ...attributes}); found.push(made); };
    if (acts.prefer) add(say("Go on with this one"), acts.prefer);
    if (node.content) add(say("Copy"), made => copy(node.content, made), {"aria-label": say("Copy message")});
    if (node.role !== "tool" && (node.content || node.error)) add(say("Edit"), () => this.edit());
    if (isAnswer && node.content && acts.goOn) add(say("Continue"), acts.goOn, {title: say("The model goes on behind the last word")});
    if (isAnswer) add(say("Regenerate"), acts.again, {title: say("Another answer, beside this one")});
    if (isAnswer && node.content && node.stats?.prompt) add(say("Heat map"), () => this.heat(), {"aria-pressed": String(Boolean(this.heatBox)), title: say("How likely the model finds each token")});
    return found;
  }

  // What was written is sent anew; an answer is kept as it was changed, and nobody is asked.
  edit() {
    const isAnswer = this.node.role === "assistant", shown = [...this.body.childNodes];
    const input = el("textarea", {rows: Math.min(isAnswer ? 24 : 12, this.node.content.split("\n").length + 1), "aria-label": say("Edit message")});
    input.value = this.node.content;
    const back = () => { this.body.replaceChildren(...shown); this.foot.hidden = false; };
    const done = () => { if (input.value.trim()) this.acts.edit(isAnswer ? input.value : input.value.trim()); };
    input.addEventListener("keydown", event => {
      if (event.key === "Escape") { event.stopPropagation(); back(); } // or it would close a panel, too
      if (event.key === "Enter" && (isAnswer ? event.ctrlKey || event.metaKey : !event.shiftKey) && !event.isComposing) { event.preventDefault(); done(); }
    });
    this.body.replaceChildren(el("div", {class: "edit"}, input, el("div", {class: "row"}, button(say("Cancel"), back), button(isAnswer ? say("Save") : say("Send"), done, {class: "main"}))));
    this.foot.hidden = true;
    input.focus();
  }

  async heat() {
    if (this.heatBox) {
      this.heatBox.remove();
      this.heatBox = null;
    } else {
      this.heatBox = el("div", {class: "dim", role: "status"}, say("The model scores its answer …"));
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
