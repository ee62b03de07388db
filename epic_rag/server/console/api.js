// Requests to the server that served this page, with the key of this tab.

const KEY = "epic-rag-key";

let whenRefused = () => {};

/** Have a function told of requests that were refused for want of a key. */
export function onRefused(tell) {
  whenRefused = tell;
}

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** What the server said is wrong, in its words. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request; paths are relative, so that the console works under a prefix, too. */
export async function request(path, { json, ...options } = {}) {
  const headers = new Headers(options.headers);
  if (key()) headers.set("Authorization", `Bearer ${key()}`);
  if (json !== undefined) {
    headers.set("Content-Type", "application/json");
    options = { method: "POST", ...options, body: JSON.stringify(json) };
  }
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  const failed = await refusal(response);
  if (failed.status === 401) whenRefused(failed.message);
  throw failed;
}

async function refusal(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Whatever stands before the server has errors of its own.
  }
  const wait = response.headers.get("Retry-After");
  return new ApiError(response.status, wait ? `${message} Try again in ${wait} s.` : message);
}

/** The objects of a stream of server-sent events; an error among them is thrown. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const pieces = (rest + value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        const data = piece.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const item = JSON.parse(data);
        if (item.error) throw new ApiError(response.status, item.error.message);
        yield item;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ApiError(0, "The connection to the server was lost.");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ApiError(0, "The connection to the server was lost.");
}
