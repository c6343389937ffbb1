// What goes with the message that is being written: pictures, sounds and texts, which were dropped, pasted, chosen or recorded. What cannot
// be used says why.

import {$, announce, button, el} from "./dom.js";
import * as models from "./models.js";
import {readPicture} from "./pictures.js";
import {canRecord, readSound, record, toWav, transcribed} from "./sounds.js";
import {aboutText, readText} from "./texts.js";
import {say} from "./words.js";

let pending = []; // [{name, kind: "picture" | "sound" | "text", value}]

// Fields of a node: those beside the message, which has them now.
export function take() {
  const of = kind => pending.filter(each => each.kind === kind);
  const found = {pictures: of("picture").map(each => each.value), sounds: of("sound").map(({name, value}) => ({name, url: value})), texts: of("text").map(each => each.value)};
  pending = [];
  forgive();
  draw();
  return Object.fromEntries(Object.entries(found).filter(([, each]) => each.length));
}

export const areThere = () => pending.length > 0;

// Removes the words about what was refused.
export const forgive = () => { $("attached-words").textContent = ""; };

// Adds those of `files` that can be used, in their order, and says why others cannot.
export async function add(files) {
  const refused = [];
  for (const file of files) {
    const name = file.name || say("What you gave");
    try {
      pending.push({name, ...await read(file)});
      announce(say("{name} is added.", {name}));
    } catch (error) {
      refused.push(`${name}: ${error.message}.`);
    }
  }
  $("attached-words").textContent = refused.join(" ");
  draw();
}

// Throws Error with the reason in words.
async function read(file) {
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") {
    if (!models.takes("image")) throw new Error(say("this model does not read pictures"));
    return {kind: "picture", value: await readPicture(file)};
  }
  if (file.type.startsWith("audio/")) {
    if (models.takes("audio")) return {kind: "sound", value: await readSound(file)};
    if (models.transcriber()) return {kind: "text", value: await writtenDown(file)};
    throw new Error(say("neither does this model hear, nor is there one that writes down speech"));
  }
  if (file.type.startsWith("video/")) throw new Error(say("this page sends no videos"));
  return {kind: "text", value: await readText(file, models.length())};
}

// What is said in a file of sound, as a text.
async function writtenDown(file) {
  const text = await transcribed(await toWav(file), models.transcriber());
  return {name: say("Transcript of {name}", {name: file.name}), size: new Blob([text]).size, text, cut: false};
}

function draw() {
  const shown = ({name, kind, value}) => kind === "picture" ? el("img", {src: value, alt: name}) : el("span", {class: "chip"}, el("b", null, kind === "text" ? value.name : name), kind === "text" ? ` ${aboutText(value)}` : ` ${say("sound")}`);
  const remove = each => { pending.splice(pending.indexOf(each), 1); draw(); $("text").focus(); };
  $("attached").replaceChildren(...pending.map(each => el("li", null, shown(each), button("✕", () => remove(each), {class: "small", "aria-label": say("Remove {name}", {name: each.name})}))));
  $("attached").hidden = !pending.length;
}

// --- the microphone --------------------------------------------------------------------------------------------------

let stop = null; // while it listens

// Shows the microphone where the model hears, or another writes down what is said.
export function refresh() { $("microphone").hidden = !(canRecord() && (models.takes("audio") || models.transcriber())); }

async function listenOrStop() {
  const control = $("microphone");
  forgive();
  try {
    if (!stop) stop = await record();
    else {
      const [finish, model] = [stop, models.transcriber()];
      stop = null;
      control.disabled = true;
      await useRecording(await finish(), model);
    }
  } catch (error) {
    $("attached-words").textContent = error.name === "NotAllowedError" || error.name === "NotFoundError" ? say("The browser gives no microphone: {reason}.", {reason: error.message}) : error.message;
  }
  control.disabled = false;
  control.setAttribute("aria-pressed", String(Boolean(stop)));
  announce(stop ? say("It listens. Press again to stop.") : say("It has stopped listening."));
}

// Speech becomes text in the message field where a model writes it down, or else goes along as a sound.
async function useRecording(recording, model) {
  if (model) {
    const text = await transcribed(await toWav(recording), model), input = $("text");
    input.value = [input.value.trimEnd(), text].filter(Boolean).join(" ");
    input.dispatchEvent(new Event("input"));
  } else {
    pending.push({name: say("Recording"), kind: "sound", value: await readSound(recording)});
    draw();
  }
  $("text").focus();
}

// Takes files from the button, the clipboard, and whatever is dropped on `place`.
export function listen(place) {
  const given = (event, list) => {
    const files = [...(list?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    add(files);
  };
  $("attach").addEventListener("click", () => $("attach-file").click());
  $("attach-file").addEventListener("change", async event => { await add(event.target.files); event.target.value = ""; $("text").focus(); });
  $("microphone").addEventListener("click", listenOrStop);
  $("text").addEventListener("paste", event => given(event, event.clipboardData));
  place.addEventListener("dragover", event => { if ([...event.dataTransfer.types].includes("Files")) { event.preventDefault(); place.classList.add("drop"); } });
  place.addEventListener("dragleave", event => { if (!place.contains(event.relatedTarget)) place.classList.remove("drop"); });
  place.addEventListener("drop", event => { place.classList.remove("drop"); event.preventDefault(); given(event, event.dataTransfer); });
}
