// The recorder: the last hour of the feed, packed a minute at a time, to look back at, and as a file. It keeps what this page has received:
// the server records nothing.

import {Feed, WINDOW_S} from "./feed.js";
import {say} from "./words.js";

const HOUR_S = 3600;
const FORMAT = 1;
const PACKED = 60; // events that are packed together

export class Recorder {
  constructor() {
    this.packs = []; // [{to, bytes}]: gzip of lines, the oldest first; `to`: the last event's second
    this.lines = []; // since the last pack
  }

  // `line`: an event as the server sent it, of second `wall_s`.
  async take(wall_s, line) {
    this.lines.push(`${line}\n`);
    if (this.lines.length < PACKED) return;
    const pack = {to: wall_s, bytes: null};
    this.packs.push(pack); // at its place, before it is packed
    pack.bytes = packed(this.lines.splice(0).join(""));
    while (this.packs[0].to < wall_s - HOUR_S) this.packs.shift();
    await pack.bytes;
  }

  // All of it as a gzip file: a line that says what it is, and a line an event.
  async file() {
    const rest = this.lines.join(""), {readable, writable} = new CompressionStream("gzip"), whole = new Response(readable).blob();
    const writer = writable.getWriter(), text = new TextEncoder();
    await writer.write(text.encode(`${JSON.stringify({oneloop_recording: FORMAT})}\n`));
    for (const {bytes} of [...this.packs]) await writer.write(new Uint8Array(await unpacked(await bytes).arrayBuffer()));
    await writer.write(text.encode(rest));
    await writer.close();
    return whole;
  }
}

const through = (blob, stream) => new Response(blob.stream().pipeThrough(stream));
const packed = text => through(new Blob([text]), new CompressionStream("gzip")).blob();
const unpacked = blob => through(blob, new DecompressionStream("gzip"));

// What a file has recorded, to be seen at any of its moments.
export class Recording {
  // Throws Error for a file that is none.
  static async of(file) {
    let lines;
    try { lines = (await unpacked(file).text()).split("\n").filter(Boolean); } catch { throw new Error(say("the file is no recording of this page")); }
    if (!lines[0]?.startsWith('{"oneloop_recording":1}') || lines.length < 2) throw new Error(say("the file is no recording of this page"));
    const found = new Recording(lines.slice(1));
    if (!found.seconds.every(Number.isFinite)) throw new Error(say("the recording is damaged"));
    return found;
  }

  constructor(lines) {
    this.lines = lines;
    this.seconds = lines.map(line => Number(/"wall_s":\s*([\d.]+)/.exec(line)?.[1]));
  }

  get length() { return this.lines.length; }

  // The feed as it was at event `at`, with the minute before it. Throws Error where the file is damaged.
  feed(at, chosen) {
    const found = new Feed();
    for (let each = 0; each <= at; each++) if (this.seconds[each] >= this.seconds[at] - WINDOW_S) found.take(JSON.parse(this.lines[each]));
    found.chosen = chosen;
    return found;
  }
}
