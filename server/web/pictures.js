// Pictures as this page keeps and sends them: data URLs. Nothing is fetched from anywhere.

import {el} from "./dom.js";
import {say} from "./words.js";

const KINDS = /^data:image\/(png|jpeg|webp|gif|bmp|avif|tiff);base64,[A-Za-z0-9+/]+=*$/;
const MAX_BYTES = 3 << 20; // of a file as it is; a larger one is drawn anew, since a request has room for some
const MAX_SIDE = 2048;

// Whether a text is a picture as this page keeps it.
export const isPicture = text => typeof text === "string" && KINDS.test(text);

// The data URL of a file. Throws Error for one that this browser cannot draw.
export async function readPicture(file) {
  if (file.size <= MAX_BYTES) {
    const url = await dataUrl(file);
    if (isPicture(url)) return url;
  }
  let bitmap;
  try { bitmap = await createImageBitmap(file); } catch { throw new Error(say("this browser knows no such picture")); }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height)), canvas = el("canvas", {width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale))});
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // where the picture is clear: JPEG has no such thing
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(say("it cannot be read")));
    reader.readAsDataURL(file);
  });
}
