// What is drawn on canvas: lines, the map of KV blocks, the steps of the last minute. Colours are the page's, in the light and in the dark.

import {WINDOW_S} from "./feed.js";
import {say, whole} from "./words.js";

// A canvas of as many pixels as the screen has, cleared: [context, width, height] in CSS pixels.
function fresh(canvas) {
  const {clientWidth: width, clientHeight: height} = canvas, ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}

export function colours(element) {
  const probe = element.querySelector(".probe") ?? element.appendChild(Object.assign(document.createElement("i"), {className: "probe"}));
  return name => { probe.className = `probe ${name}`; return getComputedStyle(probe).color; };
}

// A line of [[s, value]] up to `now_s`, with the space below it filled.
export function line(canvas, points, now_s, colour) {
  const [context, width, height] = fresh(canvas), most = Math.max(1e-9, ...points.map(([, value]) => value ?? 0));
  const x = at_s => width - (now_s - at_s) / WINDOW_S * width, y = value => height - 1.5 - (value ?? 0) / most * (height - 4);
  if (points.length < 2) return;
  context.beginPath();
  for (const [at_s, value] of points) context.lineTo(x(at_s), y(value));
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(x(points.at(-1)[0]), height);
  context.lineTo(x(points[0][0]), height);
  context.globalAlpha = 0.14;
  context.fillStyle = colour;
  context.fill();
  context.globalAlpha = 1;
}

// Cells in rows, each filled from below: shared, used, cached; what is left of it is free.
export function kvMap(canvas, cells, colour) {
  const [context, width, height] = fresh(canvas), count = cells.length / 3;
  if (!count) return;
  let size = Math.floor(Math.sqrt(width * height / count));
  while (size > 2 && Math.floor(width / size) * Math.floor(height / size) < count) size--;
  const columns = Math.floor(width / size), box = size > 4 ? size - 1 : size;
  const kinds = [["shared", 1], ["used", 0], ["cached", 2]].map(([name, at]) => [colour(name), at]), free = colour("free");
  for (let cell = 0; cell < count; cell++) {
    const left = cell % columns * size, top = Math.floor(cell / columns) * size;
    context.fillStyle = free;
    context.fillRect(left, top, box, box);
    let filled = 0;
    for (const [fill, at] of kinds) {
      const part = cells[3 * cell + at] / 255 * box;
      if (!part) continue;
      context.fillStyle = fill;
      context.fillRect(left, top + box - Math.min(box, filled + part), box, Math.min(part, box - filled));
      filled += part;
    }
  }
}

// How a step stands on the timeline: [left, width] in pixels.
const place = (step, now_s, width) => {
  const left = width - (now_s - step[1]) / WINDOW_S * width, right = width - (now_s - step[2]) / WINDOW_S * width;
  return [left, Math.max(1, right - left)];
};

// Lanes, from above: prompt tokens of each step; its decodes; whether a graph was replayed; the device's pauses.
export function timeline(canvas, steps, now_s, colour) {
  const [context, width, height] = fresh(canvas), room = height - 44, upper = Math.round(room * 0.55);
  const [mostPrompt, mostDecode] = [3, 4].map(at => steps.reduce((most, step) => Math.max(most, step[at]), 8));
  const [prompt, decode, graph, plain, gap, axis] = ["prompt", "decode", "graph", "plain-step", "gap", "axis"].map(colour);
  const bar = (left, bottom, wide, tall, fill) => { context.fillStyle = fill; context.fillRect(left, bottom - tall, wide, tall); };
  for (const step of steps) {
    const [left, wide] = place(step, now_s, width);
    bar(left, upper, wide, step[3] / mostPrompt * (upper - 14), prompt);
    bar(left, room, wide, step[4] / mostDecode * (room - upper - 18), decode);
    context.fillStyle = step[6] ? graph : plain;
    context.fillRect(left, room + 5, wide, 7);
    if (step[7] > 0.0005) { // s: shorter pauses are every step's
      const pause = Math.max(1, step[7] / WINDOW_S * width);
      context.fillStyle = gap;
      context.fillRect(left - pause, room + 16, pause, 7);
    }
  }
  context.fillStyle = axis;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "bottom";
  for (let ago = WINDOW_S; ago >= 0; ago -= 10) {
    context.textAlign = ago === WINDOW_S ? "left" : ago ? "center" : "right";
    context.fillText(ago ? `−${ago} s` : say("now"), width - ago / WINDOW_S * width, height);
  }
  context.textAlign = "left";
  context.textBaseline = "top";
  context.fillText(say("prompt tokens, {count} at most", {count: whole(mostPrompt)}), 2, 0);
  context.fillText(say("decodes, {count} at most", {count: whole(mostDecode)}), 2, upper + 3);
}

// The step at a place of the timeline, if there is one within three pixels.
export function stepAt(steps, now_s, width, x) {
  let best = null, nearest = 3;
  for (const step of steps) {
    const [left, wide] = place(step, now_s, width), distance = x < left ? left - x : Math.max(0, x - left - wide);
    if (distance < nearest) [best, nearest] = [step, distance];
  }
  return best;
}
