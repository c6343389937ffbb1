// Pictures beside the message that is being written: dropped, pasted or chosen, where the model sees. Kept as data URLs, which is how they
// are sent; nothing is fetched from anywhere.

import {$, announce, button, el} from "./dom.js";

const KINDS = /^data:image\/(png|jpeg|webp|gif|bmp|avif|tiff);base64,[A-Za-z0-9+/]+=*$/;
const MAX_BYTES = 3 << 20; // of a file as it is; a larger one is drawn anew, since a request has room for some
const MAX_SIDE = 2048;
let pending = []; // [{name, url}]

// Whether a text is a picture as this page keeps it.
export const isPicture = text => typeof text === "string" && KINDS.test(text);

// Those beside the message, which has them now.
export function take() {
  const taken = pending.map(each => each.url);
  pending = [];
  forgive();
  draw();
  return taken;
}

export const areThere = () => pending.length > 0;

// Removes the words about what was refused.
export const forgive = () => { $("picture-words").textContent = ""; };

// Adds those of `files` that are pictures, in their order, and says what is none.
async function add(files) {
  for (const file of files) {
    try {
      pending.push({name: file.name || "Picture", url: await read(file)});
      announce(`${file.name || "A picture"} is added.`);
    } catch (error) {
      $("picture-words").textContent = `${file.name || "What you gave"}: ${error.message}.`;
      continue;
    }
    forgive();
  }
  draw();
}

async function read(file) {
  if (file.size <= MAX_BYTES) {
    const url = await dataUrl(file);
    if (isPicture(url)) return url;
  }
  let bitmap;
  try { bitmap = await createImageBitmap(file); } catch { throw new Error("this browser knows no such picture"); }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height)), canvas = el("canvas", {width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale))});
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // where the picture is clear: JPEG has no such thing
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("it cannot be read"));
    reader.readAsDataURL(file);
  });
}

function draw() {
  $("pictures").replaceChildren(...pending.map(each => el("li", null, el("img", {src: each.url, alt: each.name}), button("✕", () => { pending.splice(pending.indexOf(each), 1); draw(); $("text").focus(); }, {class: "small", "aria-label": `Remove ${each.name}`}))));
  $("pictures").hidden = !pending.length;
}

// Takes pictures from the button, the clipboard, and whatever is dropped on `place`. `sees()`: whether the model does.
export function listen(place, sees) {
  const given = (event, list) => {
    const files = [...(list?.files ?? [])].filter(file => file.type.startsWith("image/"));
    if (!files.length) return;
    event.preventDefault();
    if (sees()) add(files);
    else $("picture-words").textContent = "This model reads text only.";
  };
  $("picture").addEventListener("click", () => $("picture-file").click());
  $("picture-file").addEventListener("change", async event => { await add(event.target.files); event.target.value = ""; $("text").focus(); });
  $("text").addEventListener("paste", event => given(event, event.clipboardData));
  place.addEventListener("dragover", event => { if ([...event.dataTransfer.types].includes("Files")) { event.preventDefault(); place.classList.add("drop"); } });
  place.addEventListener("dragleave", event => { if (!place.contains(event.relatedTarget)) place.classList.remove("drop"); });
  place.addEventListener("drop", event => { place.classList.remove("drop"); event.preventDefault(); given(event, event.dataTransfer); });
}
