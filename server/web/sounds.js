// Sounds: whatever this browser can play or record becomes a WAV of one channel at 16 kHz, which is what models hear.

import {dataUrl} from "./pictures.js";
import {ask} from "./server.js";
import {say} from "./words.js";

const RATE_HZ = 16_000;
const KIND = /^data:audio\/wav;base64,[A-Za-z0-9+/]+=*$/;

// Whether a text is a sound as this page keeps it.
export const isSound = text => typeof text === "string" && KIND.test(text);
export const base64Of = url => url.slice(url.indexOf(",") + 1);
export const readSound = async file => dataUrl(await toWav(file));

// A Blob of the same sound. Throws Error for a file that this browser cannot play.
export async function toWav(file) {
  const context = new OfflineAudioContext(1, 1, RATE_HZ);
  let heard;
  try { heard = await context.decodeAudioData(await file.arrayBuffer()); } catch { throw new Error(say("this browser cannot play it")); }
  const channels = Array.from({length: heard.numberOfChannels}, (_, at) => heard.getChannelData(at));
  const bytes = new DataView(new ArrayBuffer(44 + 2 * heard.length));
  const text = (at, letters) => [...letters].forEach((letter, offset) => bytes.setUint8(at + offset, letter.charCodeAt(0)));
  text(0, "RIFF"); bytes.setUint32(4, 36 + 2 * heard.length, true); text(8, "WAVEfmt ");
  bytes.setUint32(16, 16, true); bytes.setUint16(20, 1, true); bytes.setUint16(22, 1, true); // PCM, one channel
  bytes.setUint32(24, RATE_HZ, true); bytes.setUint32(28, 2 * RATE_HZ, true); bytes.setUint16(32, 2, true); bytes.setUint16(34, 16, true);
  text(36, "data"); bytes.setUint32(40, 2 * heard.length, true);
  for (let at = 0; at < heard.length; at++) {
    const mean = channels.reduce((sum, channel) => sum + channel[at], 0) / channels.length;
    bytes.setInt16(44 + 2 * at, Math.round(32767 * Math.max(-1, Math.min(1, mean))), true);
  }
  return new Blob([bytes], {type: "audio/wav"});
}

// What is said in a WAV, by OpenAI's API. Throws ServerError, TypeError.
export async function transcribed(wav, model) {
  const form = new FormData();
  form.append("file", wav, "recording.wav");
  form.append("model", model);
  form.append("response_format", "json");
  return (await (await ask("v1/audio/transcriptions", {form})).json()).text.trim();
}

// Whether this browser lets pages listen: it wants https or localhost.
export const canRecord = () => Boolean(navigator.mediaDevices?.getUserMedia && globalThis.MediaRecorder);

// Listens from now on. Returns a function that stops it and gives a Blob. Throws DOMException where nobody allows it.
export async function record() {
  const stream = await navigator.mediaDevices.getUserMedia({audio: true});
  const recorder = new MediaRecorder(stream), pieces = [];
  recorder.addEventListener("dataavailable", event => pieces.push(event.data));
  recorder.start();
  return () => new Promise(resolve => {
    recorder.addEventListener("stop", () => {
      for (const track of stream.getTracks()) track.stop();
      resolve(new Blob(pieces, {type: recorder.mimeType}));
    }, {once: true});
    recorder.stop();
  });
}
