// The server, as the pages ask it: addresses relative to where these files came from, the key that was typed in, errors in its own words.

const BASE = new URL("../../", import.meta.url); // of web/VERSION/server.js
const KEY = "oneloop.key";

export class ServerError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
  get wantsKey() { return this.status === 401 || this.code === "insufficient_permissions"; }
}

// The API key: for this tab, or, if its owner wants that, for this browser.
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "",
  get remembered() { return localStorage.getItem(KEY) !== null; },
  set(value, remember) {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
    if (value) (remember ? localStorage : sessionStorage).setItem(KEY, value);
  },
};

// Response to a request that the server took. Throws ServerError, AbortError, or TypeError where nobody answers.
// `body` is sent as JSON, `form` as it is.
export async function ask(path, {body, form, signal, headers} = {}) {
  const own = key.get() ? {Authorization: `Bearer ${key.get()}`} : {};
  const sent = form ? {method: "POST", body: form} : body === undefined ? {} : {method: "POST", body: JSON.stringify(body)};
  if (body !== undefined) own["Content-Type"] = "application/json";
  const response = await fetch(new URL(path, BASE), {...sent, headers: {...own, ...headers}, signal, cache: "no-store"});
  if (response.ok) return response;
  const text = await response.text();
  let error = {};
  try { error = JSON.parse(text).error ?? {}; } catch { /* a proxy's own words */ }
  throw new ServerError(response.status, error.message ?? `HTTP ${response.status} ${response.statusText}`, error.code);
}

export const json = async (path, options) => (await ask(path, options)).json();

// The data of each server-sent event; those without data, which are pings, are none.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = "";;) {
      const {done, value} = await reader.read();
      if (done) return;
      const whole = (rest + value).split(/\r?\n\r?\n/);
      rest = whole.pop();
      for (const event of whole) {
        const data = event.split(/\r?\n/).filter(line => line.startsWith("data:")).map(line => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // who stops reading wants no more of it
  }
}

// A dialog for the key. Resolves when it is closed: whether there is a new one.
export function askForKey(dialog, reason) {
  const [input, remember, why] = [dialog.querySelector("input[type=password]"), dialog.querySelector("input[type=checkbox]"), dialog.querySelector(".why")];
  why.textContent = reason ?? "";
  input.value = key.get();
  remember.checked = key.remembered;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise(resolve => dialog.addEventListener("close", () => {
    if (dialog.returnValue === "save") key.set(input.value.trim(), remember.checked);
    resolve(dialog.returnValue === "save");
  }, {once: true}));
}
