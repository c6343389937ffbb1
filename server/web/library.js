// Conversations, kept in this browser's IndexedDB and nowhere else. Where it has none (some private windows), they last as long as the page.

let opened = null;
const inMemory = new Map();
export let isLasting = true;

function database() {
  return opened ??= new Promise(resolve => {
    const failed = () => { isLasting = false; resolve(null); };
    try {
      const request = indexedDB.open("oneloop", 1);
      request.onupgradeneeded = () => request.result.createObjectStore("conversations", {keyPath: "id"});
      request.onsuccess = () => resolve(request.result);
      request.onerror = failed;
    } catch { failed(); }
  });
}

async function within(mode, act) {
  const base = await database();
  return new Promise((resolve, reject) => {
    const transaction = base.transaction("conversations", mode), request = act(transaction.objectStore("conversations"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

// All of them, the latest first.
export async function all() {
  const found = await database() ? await within("readonly", store => store.getAll()) : [...inMemory.values()];
  return found.sort((one, other) => other.updated - one.updated);
}

export async function save(whole) {
  const copy = structuredClone(whole);
  if (await database()) await within("readwrite", store => store.put(copy));
  else inMemory.set(copy.id, copy);
}

export async function remove(id) {
  if (await database()) await within("readwrite", store => store.delete(id));
  else inMemory.delete(id);
}
