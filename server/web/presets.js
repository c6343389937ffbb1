// Presets: settings (system prompt, sampling, tools, form of the answer) under a name, kept in this browser.

const KEPT = "oneloop.presets";

function read() {
  try { return JSON.parse(localStorage.getItem(KEPT)) ?? {}; } catch { return {}; } // not ours, or damaged
}

export const names = () => Object.keys(read()).sort((one, other) => one.localeCompare(other));

// The settings of that name; null where there are none.
export function find(name) {
  const all = read();
  return Object.hasOwn(all, name) ? all[name] : null;
}

export function save(name, settings) { localStorage.setItem(KEPT, JSON.stringify({...read(), [name]: settings})); }

export function remove(name) {
  const {[name]: gone, ...rest} = read();
  localStorage.setItem(KEPT, JSON.stringify(rest));
}
