// Documents: added with progress, listed, deleted.

import { events, request } from "./api.js";
import { button, find, make, plural, seconds, shortName } from "./dom.js";

const PATH = "v1/documents";
const PAGE = 100;

let listing = 0;

/** Wire the panel up; `confirmed` asks whether something may be deleted. */
export function startDocuments(confirmed) {
  const files = find("files");
  files.addEventListener("change", () => {
    addFiles([...files.files]);
    files.value = "";
  });
  const drop = find("drop");
  for (const type of ["dragenter", "dragover", "dragleave", "drop"]) {
    drop.addEventListener(type, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", type === "dragenter" || type === "dragover");
    });
  }
  drop.addEventListener("drop", (event) => addFiles([...event.dataTransfer.files]));
  // A file that misses the field must not replace the page.
  for (const type of ["dragover", "drop"]) document.addEventListener(type, (event) => event.preventDefault());
  find("paste-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const document = { id: find("paste-name").value.trim(), text: find("paste-text").value };
    add(document.id, { json: { documents: [document], stream: true } }, () => event.target.reset());
  });
  find("documents-more").addEventListener("click", (event) => list(event.target.dataset.after));
  find("documents").addEventListener("click", async (event) => {
    const id = event.target.dataset.id;
    if (id !== undefined && (await confirmed(`Delete ${id}?`))) await remove(id);
  });
}

function addFiles(files) {
  if (!files.length) return;
  const body = new FormData();
  for (const file of files) body.append("files", file);
  body.append("stream", "true");
  add(files.length === 1 ? files[0].name : plural(files.length, "file"), { method: "POST", body });
}

/** One job: its progress is shown until it ends; an error stays until it is dismissed. */
async function add(name, options, done = () => {}) {
  const cancel = new AbortController();
  const progress = make("progress", { "aria-label": `Adding ${name}` });
  const state = make("span", { className: "meta" }, "Sending…");
  const end = button("Cancel", () => cancel.abort(), { className: "quiet", "aria-label": `Cancel adding ${name}` });
  const job = make("li", {}, make("strong", {}, name), end, progress, state);
  find("jobs").append(job);
  find("documents-note").textContent = "";
  try {
    for await (const news of events(await request(PATH, { ...options, signal: cancel.signal }))) {
      if (news.object === "epic.progress") {
        progress.max = news.total || 1;
        progress.value = news.done;
        state.textContent =
          news.stage === "read"
            ? `${plural(news.done, "document")} read`
            : `Compiling: ${news.done} of ${plural(news.total, "token")}`;
      } else {
        find("documents-note").textContent = summary(news);
        done();
      }
    }
    close(job);
  } catch (error) {
    if (error.name === "AbortError") {
      find("documents-note").textContent = "Cancelled. What was compiled is kept for the next time.";
      close(job);
    } else {
      progress.remove();
      state.className = "error";
      state.setAttribute("role", "alert");
      state.textContent = error.message;
      end.replaceWith(button("Dismiss", () => close(job), { className: "quiet", "aria-label": `Dismiss ${name}` }));
    }
  }
  await list();
}

/** Take a row out; whoever stood on its button stands on the panel's title then. */
function close(row) {
  if (row.contains(document.activeElement)) find("documents-title").focus();
  row.remove();
}

function summary({ added, updated, unchanged, chunks, tokens, seconds: spent }) {
  const parts = [
    [added, "added"],
    [updated, "updated"],
    [unchanged, "known already"],
  ].filter(([ids]) => ids.length);
  const what = parts.map(([ids, how]) => `${plural(ids.length, "document")} ${how}`).join(", ");
  const cost = tokens ? `: ${plural(chunks, "chunk")}, ${plural(tokens, "token")} in ${seconds(spent)}` : "";
  return `${what}${cost}.`;
}

/** Show the documents; with `after` those behind an id, in addition. */
export async function list(after = "") {
  const mine = ++listing;
  try {
    const page = await (await request(`${PATH}?limit=${PAGE}&after=${encodeURIComponent(after)}`)).json();
    if (mine !== listing) return;
    find("documents-error").textContent = "";
    const rows = page.data.map(row);
    if (after) find("documents").append(...rows);
    else find("documents").replaceChildren(...rows);
    find("documents-more").hidden = !page.has_more;
    find("documents-more").dataset.after = page.last_id ?? "";
    const shown = find("documents").childElementCount;
    find("documents-total").textContent = page.has_more ? `the first ${shown}` : shown ? `${shown}` : "none yet";
    find("lead").textContent = shown ? "Ask about your documents." : "Add documents, then ask about them.";
  } catch (error) {
    find("documents-error").textContent = error.message;
  }
}

function row({ id, chunks, tokens, metadata }) {
  const name = shortName(id);
  const figures = [metadata.title, plural(chunks, "chunk"), plural(tokens, "token")].filter(Boolean).join(" · ");
  const folder = make("span", { className: "folder" }, id.slice(0, id.lastIndexOf(name)));
  return make(
    "li",
    {},
    make("strong", {}, folder, id.slice(id.lastIndexOf(name))),
    make("button", { type: "button", className: "quiet", "data-id": id, "aria-label": `Delete ${id}` }, "Delete"),
    make("span", { className: "meta" }, figures),
  );
}

async function remove(id) {
  try {
    await request(`${PATH}/${encodeURIComponent(id)}`, { method: "DELETE" });
    find("documents-note").textContent = `${id} was deleted.`;
  } catch (error) {
    find("documents-error").textContent = error.message;
    return;
  }
  await list();
  find("documents-title").focus();
}
