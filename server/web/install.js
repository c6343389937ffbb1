// The page as an app: a service worker keeps its files, so that conversations can be read where the server cannot be reached.

// Browsers take a worker's address from a policy of that name alone (see `http/pages.py`), and this one gives no other address.
const rules = {createScriptURL: () => new URL("worker.js", import.meta.url).href};
const policy = globalThis.trustedTypes?.createPolicy("oneloop-worker", rules) ?? rules;

// Does nothing where browsers have no service workers: they want https or localhost.
export async function install() {
  if (!navigator.serviceWorker) return;
  try {
    await navigator.serviceWorker.register(policy.createScriptURL(""), {scope: new URL("../../", import.meta.url).pathname});
  } catch { /* forbidden in some private windows: the page works without */ }
}
