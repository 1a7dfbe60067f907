/** Named byte arrays in the browser's IndexedDB, which outlive the page. */

const DATABASE = "onnxtrain";
const STORE = "checkpoints";

function done<Result>(request: IDBRequest<Result>): Promise<Result> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function withStore<Result>(mode: IDBTransactionMode, use: (store: IDBObjectStore) => IDBRequest<Result>): Promise<Result> {
  const opening = indexedDB.open(DATABASE, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE);
  const database = await done(opening);
  try {
    return await done(use(database.transaction(STORE, mode).objectStore(STORE)));
  } finally {
    database.close();
  }
}

export async function keep(name: string, bytes: Uint8Array): Promise<void> {
  await withStore("readwrite", (store) => store.put(bytes, name));
}

export function recall(name: string): Promise<Uint8Array | undefined> {
  return withStore<Uint8Array | undefined>("readonly", (store) => store.get(name));
}
