// The service worker: gives the chat page and its files where the server cannot be reached. All else goes to the server as it is.

const SHELL = new URL("../../", location).href, FILES = new URL("./", location).href; // FILES: of web/VERSION/worker.js
const OURS = `oneloop ${SHELL} `, CACHE = OURS + FILES;

async function keep() {
  const cache = await caches.open(CACHE), page = await fetch(SHELL, {cache: "no-store"}), html = await page.clone().text();
  const named = [...html.matchAll(/(?:src|href)="(web\/[^"]+)"/g)].map(([, path]) => new URL(path, SHELL).href);
  const tables = ["de", "zh"].map(language => `${FILES}words.${language}.json`);
  await cache.addAll([...new Set([...named, ...tables])]);
  await cache.put(SHELL, page);
  await skipWaiting();
}

// Files of other releases go. Browsers ask for a page while this worker starts.
async function clean() {
  await registration.navigationPreload?.enable();
  for (const name of await caches.keys()) if (name.startsWith(OURS) && name !== CACHE) await caches.delete(name);
  await clients.claim();
}

async function page({request, preloadResponse}) {
  try { return await preloadResponse ?? await fetch(request); } catch (error) {
    const kept = await caches.match(SHELL, {cacheName: CACHE});
    if (kept) return kept;
    throw error;
  }
}

const file = async request => await caches.match(request, {cacheName: CACHE}) ?? fetch(request);

addEventListener("install", event => event.waitUntil(keep()));
addEventListener("activate", event => event.waitUntil(clean()));
addEventListener("fetch", event => {
  const {request} = event;
  if (request.mode === "navigate" && request.url.split(/[?#]/)[0] === SHELL) event.respondWith(page(event));
  else if (request.method === "GET" && request.url.startsWith(FILES)) event.respondWith(file(request));
});
