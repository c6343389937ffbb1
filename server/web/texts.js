// Files of text: read as far as the model has room for them, and written into the prompt with their names and sizes.

import {say, whole} from "./words.js";

const CHARS_PER_TOKEN = 2; // so that what is kept fills about half of the context
const MAX_CHARS = 200_000; // where nobody knows the context

// {name, size, text, cut}: `cut` is true where the file goes on. Throws Error for what is no text.
export async function readText(file, numTokens) {
  const maxChars = numTokens ? CHARS_PER_TOKEN * numTokens : MAX_CHARS;
  const bytes = new Uint8Array(await file.slice(0, 4 * maxChars).arrayBuffer());
  const name = bytes[0] === 0xff && bytes[1] === 0xfe ? "utf-16le" : bytes[0] === 0xfe && bytes[1] === 0xff ? "utf-16be" : "utf-8";
  let text;
  try { text = new TextDecoder(name, {fatal: true}).decode(bytes, {stream: bytes.length < file.size}); } catch { throw new Error(refusal(file)); }
  if (text.includes("\0")) throw new Error(refusal(file));
  const kept = text.slice(0, maxChars).replace(/[\ud800-\udbff]$/, ""); // no half of a character
  return {name: file.name || say("Text"), size: file.size, text: kept, cut: kept.length < text.length || bytes.length < file.size};
}

function refusal(file) {
  if (file.type === "application/pdf" || /\.pdf$/i.test(file.name)) return say("this page cannot read PDF. Copy the text out of it, or save it as text");
  return say("it is no text, picture or sound that this page can read");
}

export const sizeInWords = size => size < 1000 ? `${size} B` : size < 1e6 ? `${(size / 1000).toFixed(1)} kB` : `${(size / 1e6).toFixed(1)} MB`;

// What is said of it beside its name.
export const aboutText = ({size, text, cut}) => cut ? say("{size}, cut: the first {chars} characters", {size: sizeInWords(size), chars: whole(text.length)}) : sizeInWords(size);

// As it stands in a prompt: in a fence that nothing within it closes.
export function inPrompt({name, size, text, cut}) {
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  return `File ${name} (${size} bytes${cut ? `, cut: the first ${text.length} characters` : ""}):\n${fence}\n${text}\n${fence}`;
}
